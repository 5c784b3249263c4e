"""A session whose turn ended in a tool call is kept for the tool's time, over others like it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sessionkv import SamplingParams
from sessionkv.text.model import TextModel
from tests.builders import text as texts
from tests.builders.engine import CheckedEngine, engine_config, greedy, open_engine

CALL, ANSWER = '{"name": "look", "parameters": {"city": "Oslo"}}', "It is cold."
SAMPLING = SamplingParams(temperature=0.0, max_tokens=200)


class Replies:
    """Makes a model say what a test wants: ``text`` and the end of the turn."""

    def __init__(self, folder: Path) -> None:
        self._model = TextModel.load(folder)
        vocabulary = self._model._vocabulary.control
        self._header_end = vocabulary["<|end_header_id|>"]
        self._gap = len(self._model.encoder.encode_text_inside("\n\n"))
        self.text = ANSWER

    def __call__(self, known: Sequence[int]) -> int | None:
        reply = texts.reply(self._model, self.text)
        headers = [i for i, token_id in enumerate(known) if token_id == self._header_end]
        at = len(known) - headers[-1] - 1 - self._gap if headers else 0
        return reply[at] if headers and 0 <= at < len(reply) else None


def expected(engine: CheckedEngine) -> tuple[int, int]:
    found = engine.stats()["retention"]
    return found["expected_sessions"], found["expected_blocks"]


def on_device(engine: CheckedEngine, name: str) -> int:
    found = engine.session(name).info().bytes["device"]
    return found.exclusive + found.shared


def test_a_call_is_waited_for_and_an_answer_is_not(tmp_path: Path) -> None:
    folder = texts.write_folder("llama3", tmp_path)
    replies = Replies(folder)
    runner = {"text_dir": folder, "script": replies}
    with open_engine(engine_config(blocks=200), runner=runner) as engine:
        replies.text = CALL
        session = engine.open("agent")
        assert session.turn("Is it cold?", sampling=SAMPLING).text == CALL
        sessions, blocks = expected(engine)
        assert (sessions, blocks * engine.parts.runner.geometry.block_bytes) == (
            1,
            on_device(engine, "agent"),
        )
        result = {"role": "tool", "content": "-9", "name": "look", "tool_call_id": "1"}
        assert session.turn(messages=[result], sampling=SAMPLING).text == CALL
        assert expected(engine)[1] > blocks
        replies.text = ANSWER
        assert session.turn(messages=[result], sampling=SAMPLING).text == ANSWER
        assert expected(engine) == (0, 0)
        engine.assert_ledger()


def test_who_waits_for_a_tool_outstays_who_was_used_later(tmp_path: Path) -> None:
    folder = texts.write_folder("llama3", tmp_path)
    replies = Replies(folder)
    runner = {"text_dir": folder, "script": replies}
    with open_engine(engine_config(blocks=100), runner=runner) as engine:
        for name, text in (("agent", CALL), ("person", ANSWER)):
            replies.text = text
            assert engine.open(name).turn("Is it cold?" + name, sampling=SAMPLING).text == text
        agent, person = on_device(engine, "agent"), on_device(engine, "person")
        free = engine.stats()["ledger"]["device"]["free"]
        engine.generate(tokens=[300] * 4 * (free + 3), sampling=greedy(1))
        assert (on_device(engine, "agent"), on_device(engine, "person")) == (
            agent,
            person - 3 * engine.parts.runner.geometry.block_bytes,
        )
        engine.assert_ledger()
