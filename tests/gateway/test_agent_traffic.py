"""A day's work of agents finds at least 95% of what each request's predecessor left."""

from __future__ import annotations

from collections.abc import Iterator

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


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    folder = keeping_thoughts(tmp_path_factory.mktemp("text"))
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
    moved = {rewrite.get("moved") for rewrite in main.rewrites}
    assert "system-reminder" in moved
    assert sum("Today's date" in str(what) for what in moved) >= 2
