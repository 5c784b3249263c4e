"""Grammars over vocabularies of every kind, token by token."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from sessionkv.engine.grammar import GrammarCompiler, TokenGrammar
from sessionkv.engine.grammar_desk import GrammarDesk, GrammarReady
from sessionkv.engine.inbox import Inbox
from sessionkv.errors import InvalidRequest, Overloaded
from sessionkv.text.builtin import BYTE_VOCAB_SIZE, END_OF_TEXT, IM_END, byte_text
from sessionkv.text.folder import TextFiles, read_text_facts
from sessionkv.text.model import TextModel
from sessionkv.types import SamplingParams
from tests.builders.grammars import Held
from tests.builders.masks import packed
from tests.builders.text import write_folder

ENDS = frozenset({END_OF_TEXT, IM_END})
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a ¼ name": {"enum": ["one two", "drei", "<|im_end|></s>"]}},
        "required": ["a ¼ name"],
    }
)


def allowed(grammar: TokenGrammar) -> list[int]:
    bits = int.from_bytes(grammar.mask, "little")
    return [i for i in range(bits.bit_length()) if bits >> i & 1]


def begin(
    grammar: dict[str, Any],
    *,
    text: Path | TextFiles | None = None,
    vocab_size: int = BYTE_VOCAB_SIZE,
    ends: frozenset[int] = ENDS,
    **fields: Any,
) -> TokenGrammar:
    compiler = GrammarCompiler(text or byte_text(), vocab_size)
    return compiler.start(SamplingParams(grammar=grammar, **fields), ends)


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "gemma"])
@pytest.mark.parametrize("seed", range(3))
def test_any_way_through_gives_what_the_schema_says(name: str, seed: int, tmp_path: Path) -> None:
    """Through tokens of bytes, of words, and with a mark for spaces."""
    folder, rng = write_folder(name, tmp_path), random.Random(seed)
    facts, model = read_text_facts(folder), TextModel.load(folder)
    ends = frozenset(facts.eos_token_ids)
    vocab_size = facts.vocab_size + 29  # padded, as many models' are
    grammar = begin(
        {"json_schema": SCHEMA}, text=folder, vocab_size=vocab_size, ends=ends, min_tokens=3
    )
    sampled: list[int] = []
    while not ends & {*sampled}:
        assert len(grammar.mask) == -(-vocab_size // 32) * 4
        choices = allowed(grammar)
        assert max(choices) < facts.vocab_size
        assert not ends & {*choices} or choices == sorted(ends)
        sampled.append(rng.choice(choices))
        if sampled[-1] not in ends:
            assert grammar.advance(sampled[-1]) is None
    value = json.loads(model.decode(sampled))
    assert value["a ¼ name"] in ("one two", "drei", "<|im_end|></s>")


def test_ends_come_where_it_is_complete() -> None:
    grammar = begin({"regex": "ab?"})
    assert allowed(grammar) == [ord("a")]
    assert grammar.advance(ord("a")) is None
    assert allowed(grammar) == [ord("b"), *sorted(ENDS)]
    assert grammar.advance(ord("b")) is None
    assert allowed(grammar) == sorted(ENDS)


def test_before_min_tokens_no_stop_comes_that_need_not() -> None:
    grammar = begin({"regex": "[xy]*z?"}, ends=ENDS | {ord("y")}, min_tokens=2)
    assert allowed(grammar) == [ord("x"), ord("z")]
    assert grammar.advance(ord("x")) is None
    assert allowed(grammar) == [ord("x"), ord("z")]
    assert grammar.advance(ord("x")) is None
    assert allowed(grammar) == [ord("x"), ord("y"), ord("z"), *sorted(ENDS)]
    short = begin({"regex": "x"}, min_tokens=9)
    assert short.advance(ord("x")) is None
    assert allowed(short) == sorted(ENDS)


def test_a_token_that_does_not_fit_is_told() -> None:
    assert "its grammar" in (begin({"regex": "a"}).advance(ord("b")) or "")


def test_what_was_compiled_starts_anew_for_each() -> None:
    compiler = GrammarCompiler(byte_text(), BYTE_VOCAB_SIZE)
    sampling = SamplingParams(grammar={"choice": ["ab", "cd"]})
    first, second = compiler.start(sampling, ENDS), compiler.start(sampling, ENDS)
    assert first.advance(ord("a")) is None
    assert allowed(first) == [ord("b")]
    assert allowed(second) == [ord("a"), ord("c")]
    assert second.mask == packed([ord("a"), ord("c")], BYTE_VOCAB_SIZE)


def test_control_tokens_are_no_text() -> None:
    assert allowed(begin({"choice": ["<|im_end|>"]})) == [ord("<")]
    assert not {256, 257, 258} & {*allowed(begin({"regex": "(?s:.)"}))}


def test_a_model_without_end_tokens_takes_none() -> None:
    files = byte_text()
    facts = json.loads(files.facts) | {"eos_token_ids": []}
    endless = TextFiles(files.tokenizer, files.template, json.dumps(facts))
    with pytest.raises(InvalidRequest, match="no token that ends a reply"):
        begin({"regex": "a"}, text=endless)


# -- the desk


def test_grammars_are_compiled_elsewhere_one_after_the_other() -> None:
    inbox: Inbox[object] = Inbox()
    desk = GrammarDesk(byte_text(), BYTE_VOCAB_SIZE, inbox, max_waiting=9)
    try:
        for turn_id, pattern in enumerate(["a", "(", "b"]):
            desk.compile(turn_id, "local", SamplingParams(grammar={"regex": pattern}), ENDS)
        answers: list[Any] = []
        while len(answers) < 3:
            answers += inbox.drain(30)
        assert all(isinstance(answer, GrammarReady) for answer in answers)
        assert [answer.turn_id for answer in answers] == [0, 1, 2]
        assert [answer.error is None for answer in answers] == [True, False, True]
        assert allowed(answers[2].grammar) == [ord("b")]
    finally:
        desk.close()
        inbox.close()


def test_no_more_wait_than_may() -> None:
    inbox: Inbox[object] = Inbox()
    desk = GrammarDesk(byte_text(), BYTE_VOCAB_SIZE, inbox, max_waiting=0)
    with pytest.raises(Overloaded, match="0 grammars wait"):
        desk.compile(1, "local", SamplingParams(grammar={"regex": "a"}), ENDS)
    desk.close()
    inbox.close()


def test_tenants_go_by_turns_and_what_is_over_is_not_compiled() -> None:
    inbox: Inbox[object] = Inbox()
    desk, held = GrammarDesk(byte_text(), BYTE_VOCAB_SIZE, inbox, max_waiting=9), Held()
    desk._compiler = held
    try:
        order = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("a", "a4"), ("b", "b1"), ("b", "b2")]
        for turn_id, (tenant, pattern) in enumerate(order):
            desk.compile(turn_id, tenant, SamplingParams(grammar={"regex": pattern}), ENDS)
            assert held.begun.wait(30)  # the first is being compiled, the others wait
        desk.withdraw(2)
        desk.withdraw(77)
        held.may_go_on.set()
        answers: list[Any] = []
        while len(answers) < 5:
            answers += inbox.drain(30)
        assert held.asked == ["a1", "a2", "b1", "a4", "b2"]
        assert [answer.turn_id for answer in answers] == [0, 1, 4, 3, 5]
    finally:
        held.may_go_on.set()
        desk.close()
        inbox.close()


class Panic(BaseException):
    """As the library's, which is no ``Exception``."""


def test_a_panic_ends_its_turn_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox: Inbox[object] = Inbox()
    desk = GrammarDesk(byte_text(), BYTE_VOCAB_SIZE, inbox, max_waiting=9)
    compiler = desk._compiler = GrammarCompiler(byte_text(), BYTE_VOCAB_SIZE)
    start = compiler.start

    def panic(sampling: SamplingParams, stop_token_ids: Any) -> TokenGrammar:
        monkeypatch.setattr(compiler, "start", start)
        raise Panic

    monkeypatch.setattr(compiler, "start", panic)
    try:
        for turn_id in range(2):
            desk.compile(turn_id, "local", SamplingParams(grammar={"regex": "a"}), ENDS)
        answers: list[Any] = []
        while len(answers) < 2:
            answers += inbox.drain(30)
        assert "Panic" in str(answers[0].error)
        assert allowed(answers[1].grammar) == [ord("a")]
    finally:
        desk.close()
        inbox.close()


def test_a_panic_on_the_way_is_a_dead_end() -> None:
    grammar = begin({"regex": "ab"})

    class Broken:
        def consume_token(self, token_id: int) -> bool:
            raise Panic

    grammar._matcher = Broken()  # type: ignore[assignment]
    assert grammar.advance(ord("a")) == "its grammar: Panic"


def test_what_a_grammar_may_take_is_bounded() -> None:
    """Each token of this one makes many states of the library's."""
    grammar, reason = begin({"regex": "(.{0,60}a.{0,60}b.{0,60}c){1,30}"}), None
    for _ in range(2000):
        reason = grammar.advance(allowed(grammar)[len(allowed(grammar)) // 2])
        if reason is not None:
            break
    assert reason is None or "too many states" in reason
