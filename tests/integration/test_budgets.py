"""A session's byte budget: its start is retained, to the block; what goes past it goes first."""

from __future__ import annotations

from pathlib import Path

import pytest

from sessionkv.engine.checksum_runner import checksum_geometry
from sessionkv.errors import InvalidRequest, SessionDiffers
from tests.builders.checksum import tokens
from tests.builders.engine import (
    GREEDY,
    CheckedEngine,
    engine_config,
    greedy,
    open_engine,
    oracle,
)

BLOCK_BYTES = checksum_geometry(4).block_bytes
DISK = 50_000_000


def turns(engine: CheckedEngine, name: str, *, start: int = 0, count: int = 2) -> list[int]:
    """Turns of 12 tokens and 8 sampled ones; the log in the end. Two leave 39 tokens with KV."""
    log: list[int] = []
    for i in range(count):
        prompt = tokens(12, start=start + 20 * i)
        reply = engine.session(name).turn(tokens=prompt, sampling=GREEDY).tokens
        log += prompt
        assert list(reply) == oracle(log)
        log += reply
    return log


def blocks(engine: CheckedEngine, name: str, tier: str = "device") -> int:
    found = engine.session(name).info().bytes[tier]
    return (found.exclusive + found.shared) // BLOCK_BYTES


def resident(engine: CheckedEngine) -> int:
    return len(engine.parts.kv.resident_keys())


@pytest.mark.parametrize(("budget", "kept"), [(0, 0), (1.0, 1), (7.99, 7), (8, 8), (10, 10)])
def test_exactly_the_blocks_within_the_budget_are_retained(budget: float, kept: int) -> None:
    with open_engine(engine_config(blocks=40)) as engine:
        engine.open("b")
        turns(engine, "b", start=45)
        engine.open("a", budget_bytes=int(budget * BLOCK_BYTES))
        turns(engine, "a")  # 9 full blocks and a tail
        assert resident(engine) == 20
        assert blocks(engine, "a") == kept
        # What nobody retains makes room before anything of b, which was used before it.
        free = engine.stats()["ledger"]["device"]["free"]
        engine.generate(tokens=[200] * 4 * (free + 10 - kept), sampling=greedy(1))
        assert blocks(engine, "b") == 10
        report = engine.session("a").turn(tokens=[7], sampling=greedy(1)).cache
        assert report.cached_tokens == min(4 * kept, 39)
        engine.assert_ledger()


def test_a_budget_is_the_sessions_and_its_forks_and_outlives_a_restart(tmp_path: Path) -> None:
    config = engine_config(tmp_path, disk_bytes=DISK)
    with open_engine(config) as engine:
        engine.open("a", budget_bytes=7 * BLOCK_BYTES)
        log = turns(engine, "a")
        engine.session("a").fork("b")
        assert engine.session("b").info().budget_bytes == 7 * BLOCK_BYTES
        engine.session("b").turn(tokens=[7], sampling=greedy(1))
        assert (blocks(engine, "a"), blocks(engine, "b")) == (7, 7)
        engine.open("a")  # absent: as it is
        for other in (6 * BLOCK_BYTES, 0):
            with pytest.raises(SessionDiffers) as raised:
                engine.open("a", budget_bytes=other)
            assert raised.value.details == {"field": "budget_bytes"}
    with open_engine(config) as engine:
        assert engine.session("a").info().budget_bytes == 7 * BLOCK_BYTES
        assert blocks(engine, "a", "disk") <= 7
        result = engine.session("a").turn(tokens=[9], sampling=greedy(1))
        assert list(result.tokens) == oracle([*log, 9], greedy(1))
        # Past the budget nothing is written for durability's sake.
        assert result.cache.disk_tokens == 28
        assert blocks(engine, "a", "device") == 7


def test_what_another_session_retains_too_is_retained() -> None:
    with open_engine(engine_config(blocks=40)) as engine:
        engine.open("small", budget_bytes=2 * BLOCK_BYTES)
        engine.open("free")
        turns(engine, "small")
        turns(engine, "free")
        assert (blocks(engine, "small"), blocks(engine, "free")) == (2, 10)
        info = engine.session("free").info().bytes["device"]
        assert (info.shared, info.exclusive) == (2 * BLOCK_BYTES, 8 * BLOCK_BYTES)


def test_a_pin_holds_what_is_within_the_budget() -> None:
    with open_engine(engine_config(blocks=24)) as engine:
        engine.open("a", budget_bytes=3 * BLOCK_BYTES)
        turns(engine, "a")
        engine.session("a").pin(tier="device")
        assert engine.stats()["retention"]["pinned_bytes"]["device"] == 3 * BLOCK_BYTES
        engine.open("b")
        turns(engine, "b", start=45)
        engine.generate(tokens=[200] * 4 * 21, sampling=greedy(1))
        assert (blocks(engine, "a"), blocks(engine, "b")) == (3, 0)


def test_of_a_deleted_session_what_went_past_its_budget_goes_too() -> None:
    with open_engine(engine_config(blocks=40)) as engine:
        engine.open("a", budget_bytes=3 * BLOCK_BYTES)
        turns(engine, "a")
        engine.session("a").close(keep=False)
        assert resident(engine) == 0
        engine.assert_ledger()


def test_a_budget_that_is_none_is_refused() -> None:
    with open_engine() as engine, pytest.raises(InvalidRequest):
        engine.open("a", budget_bytes=-1)
