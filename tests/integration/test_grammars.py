"""Structured output: what a grammar says is what comes, whatever the model would rather say."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sessionkv import FinishReason, SamplingParams
from sessionkv.errors import InvalidRequest
from sessionkv.text.builtin import END_OF_TEXT, IM_END
from tests.builders.checksum import tokens
from tests.builders.engine import (
    CheckedEngine,
    engine_config,
    greedy,
    open_engine,
    oracle,
    socket_engine,
)
from tests.builders.grammars import Held

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 9},
        "names": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["kind", "legs", "names"],
    "additionalProperties": False,
}
JSON = {"json_schema": json.dumps(SCHEMA)}


def asked(grammar: Any, max_tokens: int = 400, **fields: Any) -> SamplingParams:
    return SamplingParams(grammar=grammar, max_tokens=max_tokens, **{"temperature": 0.0} | fields)


@pytest.fixture(scope="module")
def engine() -> Iterator[CheckedEngine]:
    with open_engine(engine_config(blocks=400)) as opened:
        yield opened


def text_of(engine: CheckedEngine, grammar: Any, **fields: Any) -> str:
    result = engine.generate(tokens=tokens(9), sampling=asked(grammar, **fields))
    assert result.finish_reason is FinishReason.STOP
    assert result.tokens[-1] in (IM_END, END_OF_TEXT)
    return result.text


@pytest.mark.parametrize("seed", range(6))
def test_a_schema_is_followed(engine: CheckedEngine, seed: int) -> None:
    value = json.loads(text_of(engine, JSON, temperature=1.0, seed=seed))
    assert set(value) == {"kind", "legs", "names"}
    assert value["kind"] in ("cat", "dog")
    assert value["legs"] in range(10)
    assert len(value["names"]) <= 2


def test_any_json_object(engine: CheckedEngine) -> None:
    """The model's own choice hardly ever ends a string: it is told where."""
    script = iter(b'{"a": [1, "x"]}')
    with open_engine(runner={"script": lambda ids: next(script, None)}) as told:
        assert json.loads(text_of(told, {"json_object": True}, max_tokens=40)) == {"a": [1, "x"]}
    start = engine.generate(tokens=tokens(9), sampling=asked({"json_object": True}, 30))
    assert start.text.startswith("{")


@pytest.mark.parametrize("pattern", ["[a-c]{3}", "(yes|no)!?", r"\d{4}-\d\d"])
def test_a_regular_expression(engine: CheckedEngine, pattern: str) -> None:
    assert re.fullmatch(pattern, text_of(engine, {"regex": pattern}))


def test_a_lark_grammar(engine: CheckedEngine) -> None:
    grammar = {"lark": 'start: "<" NAME ">"\nNAME: /[a-z]{2,4}/'}
    assert re.fullmatch("<[a-z]{2,4}>", text_of(engine, grammar))


@pytest.mark.parametrize("choices", [["yes", "no"], ['a "b"\\', "\n", "日本 🎉"], ["<|im_end|>"]])
def test_one_of_some_choices(engine: CheckedEngine, choices: list[str]) -> None:
    assert text_of(engine, {"choice": choices}) in choices


def test_the_end_comes_exactly_where_the_grammar_is_complete(engine: CheckedEngine) -> None:
    """``a*`` may end anywhere, ``a{5}`` only there."""
    for seed in range(5):
        assert text_of(engine, {"regex": "a{5}"}, temperature=1.0, seed=seed) == "aaaaa"
    script = iter([97, 97, IM_END])
    with open_engine(runner={"script": lambda ids: next(script)}) as told:
        assert text_of(told, {"regex": "a*"}, max_tokens=40) == "aa"


def test_what_is_cut_is_no_complete_reply(engine: CheckedEngine) -> None:
    result = engine.generate(tokens=tokens(9), sampling=asked(JSON, 5))
    assert (result.finish_reason, len(result.tokens)) == (FinishReason.LENGTH, 5)
    assert result.text.startswith("{")


# -- beside everything else


def test_min_tokens_gives_way_where_only_the_end_may_come(engine: CheckedEngine) -> None:
    assert text_of(engine, {"choice": ["ab"]}, min_tokens=9) == "ab"
    assert len(text_of(engine, {"regex": "a*"}, min_tokens=7, max_tokens=300)) >= 7


def test_bias_decides_among_what_may_come() -> None:
    def best(logits: list[float], sampling: SamplingParams, ids: Any, num_prompt: int) -> int:
        scores = [x + sampling.logit_bias.get(i, 0.0) for i, x in enumerate(logits)]
        return max(range(len(scores)), key=scores.__getitem__)

    with open_engine(runner={"sampler": best}) as engine:
        bias = {ord("b"): 100.0, ord("z"): 1000.0}
        grammar = {"regex": "[abc]{4}"}
        assert text_of(engine, grammar, logit_bias=bias, max_tokens=40) == "bbbb"


def test_a_stop_string_cuts_it(engine: CheckedEngine) -> None:
    sampling = asked({"choice": ["one, two"]}, stop=(", ",))
    result = engine.generate(tokens=tokens(9), sampling=sampling)
    assert (result.text, result.stop) == ("one", ", ")


def test_a_stop_id_of_the_client_ends_it(engine: CheckedEngine) -> None:
    sampling = asked({"choice": ["one, two"]}, stop_token_ids=(ord(","),))
    result = engine.generate(tokens=tokens(9), sampling=sampling)
    assert (result.text, result.stop) == ("one", ord(","))


# -- cached or not, alone or not


def test_the_same_ids_warm_and_cold(engine: CheckedEngine) -> None:
    prompt = tokens(50, start=20)
    sampling = asked(JSON, temperature=1.0, seed=3)
    cold = engine.generate(tokens=prompt, sampling=sampling, cache=False)
    first = engine.generate(tokens=prompt, sampling=sampling)
    warm = engine.generate(tokens=prompt, sampling=sampling)
    assert cold.tokens == first.tokens == warm.tokens
    assert (first.cache.cached_tokens, warm.cache.cached_tokens) == (0, 49)


def test_a_grammar_begins_with_each_turn_of_a_session(engine: CheckedEngine) -> None:
    session = engine.open("s")
    for number in range(3):
        result = session.turn(f"question {number}", sampling=asked({"regex": "[xy]{3}"}))
        assert re.fullmatch("[xy]{3}", result.text)
    assert session.turn("and now?", sampling=greedy(5)).finish_reason is FinishReason.LENGTH
    session.close(keep=False)


def test_forks_of_one_prompt_go_their_own_ways(engine: CheckedEngine) -> None:
    streams = [
        engine.stream_generate(tokens=tokens(30), sampling=asked(JSON, temperature=1.0, seed=n))
        for n in range(8)
    ]
    texts = []
    for stream in streams:
        list(stream)
        assert stream.result is not None
        texts.append(json.dumps(json.loads(stream.result.text)))
    assert len(set(texts)) > 1


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_whoever_has_no_grammar_samples_as_if_nobody_had(plans_ahead: bool) -> None:
    with open_engine(runner={"plans_ahead": plans_ahead}) as engine:
        others = [
            engine.stream_generate(tokens=tokens(13, start=n), sampling=greedy(20))
            for n in range(3)
        ]
        assert json.loads(text_of(engine, JSON, max_tokens=100))
        for n, stream in enumerate(others):
            list(stream)
            assert stream.result is not None
            assert list(stream.result.tokens) == oracle(tokens(13, start=n), greedy(20))
        engine.assert_ledger()


def test_a_preempted_turn_goes_on_where_it_was() -> None:
    """Two replies of about 60 tokens do not fit 28 blocks of 4 together."""
    sampling = asked({"regex": "[a-f]{60}"}, 70)
    with open_engine(engine_config(blocks=28, host_blocks=64)) as engine:
        alone = [
            engine.generate(tokens=tokens(13, start=n), sampling=sampling, cache=False).tokens
            for n in range(2)
        ]
        streams = [
            engine.stream_generate(tokens=tokens(13, start=n), sampling=sampling) for n in range(2)
        ]
        for stream, expected in zip(streams, alone, strict=True):
            list(stream)
            assert stream.result is not None
            assert stream.result.tokens == expected
        assert engine.stats()["preemptions"] > 0
        engine.assert_ledger()


# -- what is refused


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ({"regex": "("}, "regex"),
        ({"lark": "start: foo"}, 'unknown name: "foo"'),
        ({"json_schema": "{"}, "not JSON"),
        ({"json_schema": "[1]"}, "not a JSON object"),
        ({"json_schema": '{"type": "strin"}'}, "Invalid type: strin"),
        ({"json_schema": '{"if": {}, "type": "object"}'}, "Unimplemented keys"),
        ({"json_schema": '{"$ref": "http://127.0.0.1:9/x"}'}, "not present"),
        ({"json_schema": '{"allOf": [{"type": "string"}, {"type": "null"}]}'}, "Unsatisfiable"),
        ({"lark": "start: a\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(9))}, "unknown name"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(
    engine: CheckedEngine, grammar: Any, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=r"^sampling\.grammar cannot be used: ") as refused:
        engine.generate(tokens=tokens(9), sampling=asked(grammar))
    assert words in str(refused.value)
    assert refused.value.details["field"] == "sampling.grammar"
    assert text_of(engine, {"choice": ["on it goes"]}) == "on it goes"


def test_a_turn_with_a_bad_grammar_leaves_its_session_as_it_was(engine: CheckedEngine) -> None:
    session = engine.open("t")
    session.turn("hello", sampling=greedy(3))
    with pytest.raises(InvalidRequest):
        session.turn("hello", sampling=asked({"regex": "("}))
    assert session.info().turns == 1
    assert session.turn("again", sampling=asked({"choice": ["yes"]})).text == "yes"
    session.close(keep=False)


def test_grammars_as_deep_as_they_are_long_end_no_engine(engine: CheckedEngine) -> None:
    rules = [f'r{i}:r{i + 1} "x"' for i in range(4000)]
    lark = "\n".join(["start: r0", *rules, 'r4000: "y"'])
    result = engine.generate(tokens=tokens(9), sampling=asked({"lark": lark}, 3))
    assert result.text == "yxx"
    defs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)} | {"d5000": {"const": 1}}
    schema = {"$ref": "#/$defs/d0", "$defs": defs}
    assert text_of(engine, {"json_schema": json.dumps(schema)}) == "1"


def test_the_grammar_of_a_turn_that_is_over_is_not_compiled() -> None:
    with open_engine() as engine:
        held = engine.parts.grammars._compiler = Held()
        streams = [
            engine.stream_generate(tokens=tokens(9), sampling=asked({"regex": pattern}, 20))
            for pattern in ("a", "b", "c")
        ]
        assert held.begun.wait(30)
        assert streams[1].cancel() is None
        held.may_go_on.set()
        for stream in (streams[0], streams[2]):
            list(stream)
        assert [stream.result.text for stream in streams if stream.result] == ["a", "c"]
        assert held.asked == ["a", "c"]
        engine.assert_ledger()


def test_over_a_socket_and_under_a_key(tmp_path: Path) -> None:
    with socket_engine(tmp_path) as served, served.client() as client:
        sampling = asked({"choice": ["left", "right"]}, 40)
        first = client.generate(tokens=tokens(9), sampling=sampling, idempotency_key="k")
        again = client.generate(tokens=tokens(9), sampling=sampling, idempotency_key="k")
        assert first.text in ("left", "right")
        assert (again.text, again.replayed) == (first.text, True)
