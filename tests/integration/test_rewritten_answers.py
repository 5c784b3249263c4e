"""Answers that stand in a conversation which was written anew keep the ids they were sampled as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sessionkv.types import MissReason
from tests.builders.agent_text import write_agent_text
from tests.builders.doors import Script
from tests.builders.engine import engine_config, greedy, open_engine

THOUGHTS = "<think>\nHm.\n</think>\n\n"
BROKEN = b"Well\xff\xfe."
"""Bytes that are no text: as text they are other tokens."""
SAMPLING = greedy(64, ignore_eos=False)


@pytest.mark.parametrize("said", [BROKEN, THOUGHTS.encode() + BROKEN, THOUGHTS.encode() + b"Yes."])
@pytest.mark.parametrize("restart", [False, True])
def test_the_next_turn_finds_all_of_it(tmp_path: Path, said: bytes, restart: bool) -> None:
    folder = write_agent_text(tmp_path)
    script = Script()
    runner = {"text_dir": folder, "script": script}
    config = engine_config(blocks=512, store=tmp_path / "store")
    texts: list[str] = []
    logs: list[list[int]] = []

    def messages(system: str) -> list[dict[str, object]]:
        """As a client sends them that leaves thoughts out."""
        answers = [text.rpartition("</think>")[2].strip() for text in texts]
        found: list[dict[str, object]] = [{"role": "system", "content": system}]
        for number, answer in enumerate(answers):
            found.append({"role": "user", "content": f"Question {number}"})
            found.append({"role": "assistant", "content": answer})
        return [*found, {"role": "user", "content": f"Question {len(answers)}"}]

    def turn(engine: Any, system: str) -> tuple[MissReason, int]:
        script.add((*said, 258))
        result = engine.session("a").turn(messages=messages(system), sampling=SAMPLING)
        texts.append(result.text)
        tree = engine.parts.tree
        logs.append(list(tree.tokens_of(tree.head("local", "a").node_id)))
        return result.cache.miss.reason, result.cache.cached_tokens

    with open_engine(config, runner=runner) as engine:
        engine.open("a", system="Be brief.", history="follow")
        turn(engine, "Be brief.")
        reason, _ = turn(engine, "Be long.")  # everything is written anew behind it
        assert reason is MissReason.HISTORY_EDITED
        if not restart:
            reason, cached = turn(engine, "Be long.")
    if restart:
        with open_engine(config, runner=runner) as engine:
            reason, cached = turn(engine, "Be long.")
    before, after = logs[-2:]
    assert after[: len(before)] == before
    assert bytes(i for i in before if i < 256).count(said) == 2
    if not restart:  # KV was in memory alone
        assert reason is MissReason.NONE
        assert cached >= (len(before) - 1) // 4 * 4
