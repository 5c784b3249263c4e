"""A day's work of agents finds at least 95% of what each request's predecessor left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.agent_traffic import (
    NUM_STEPS,
    Agent,
    ClaudeCode,
    OpenCode,
    Score,
    SubAgent,
    keeping_thoughts,
    replies,
)
from tests.builders.engine import engine_config
from tests.builders.gateway import HttpEngine, http_engine
from tests.builders.gateway import replies as scripted

LOST = {ClaudeCode: 3_579, OpenCode: 3_298}
"""Tokens of each day that are computed again: all behind the reminder of a mode that ends."""
LOST_UNLESS_STEADY = 6_723
"""As many of OpenCode's without the setting: a whole prompt more, at midnight."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[HttpEngine]:
    folder = keeping_thoughts(tmp_path)
    config = engine_config(blocks=4096, block_size=16, max_model_len=40_000)
    with http_engine(config, runner={"text_dir": folder, "script": scripted(*replies())}) as engine:
        yield engine


def day_of(served: HttpEngine, agent: type[Agent], *, steady: bool = True) -> tuple[Agent, Score]:
    score = Score()
    main = agent(served, score, steady=steady)
    main.work(NUM_STEPS, "Mend the parts.")
    if agent is ClaudeCode:
        SubAgent(served, score, steady=steady).work(6, "Where are the parts?")
    return main, score


@pytest.mark.parametrize("agent", [ClaudeCode, OpenCode])
def test_what_an_agent_computed_is_found(served: HttpEngine, agent: type[Agent]) -> None:
    main, score = day_of(served, agent)
    assert main.num_requests == NUM_STEPS
    assert score.share >= 0.95, score
    assert score.reusable - score.reused == LOST[agent], score
    moved = {rewrite.get("moved") for rewrite in main.rewrites}
    assert "system-reminder" in moved
    assert sum("Today's date" in str(what) for what in moved) >= 2


def test_without_the_setting_midnight_costs_a_prompt(served: HttpEngine) -> None:
    main, score = day_of(served, OpenCode, steady=False)
    assert score.reusable - score.reused == LOST_UNLESS_STEADY > 2 * LOST[OpenCode], score
    assert main.rewrites == []
