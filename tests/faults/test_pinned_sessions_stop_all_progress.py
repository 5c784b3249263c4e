"""Pins promise an order, not a place: however much is pinned, whoever wants to work gets to."""

from __future__ import annotations

from pathlib import Path

import pytest

from sessionkv import MissReason
from tests.builders.checksum import tokens
from tests.builders.doors import Later
from tests.builders.engine import engine_config, greedy, open_engine, oracle

BLOCKS = 24  # of 4 tokens; a session takes 15
LONG = greedy(4)


@pytest.mark.parametrize(("host_blocks", "disk_bytes"), [(0, 0), (24, 0), (24, 50_000_000)])
def test_ten_idle_pinned_sessions_in_a_pool_too_small_for_two(
    tmp_path: Path, host_blocks: int, disk_bytes: int
) -> None:
    config = engine_config(tmp_path, blocks=BLOCKS, host_blocks=host_blocks, disk_bytes=disk_bytes)
    with open_engine(config) as engine:
        # Pinned while they are empty, so that none is refused; then each takes over half.
        names = [f"s{i}" for i in range(10)]
        for i, name in enumerate(names):
            engine.open(name).pin(tier="host" if host_blocks and i % 2 else "device", priority=100)
        logs: dict[str, list[int]] = {}
        for i, name in enumerate(names):
            prompt = tokens(56, start=7 * i)
            reply = engine.session(name).turn(tokens=prompt, sampling=LONG).tokens
            assert list(reply) == oracle(prompt, LONG)
            logs[name] = [*prompt, *reply]
        # A stranger that needs the whole pool, and then all ten at once with strangers between.
        stranger = tokens(BLOCKS * 4 - 4, start=81)
        assert list(engine.generate(tokens=stranger, sampling=LONG).tokens) == oracle(
            stranger, LONG
        )
        work = []
        for i, (name, log) in enumerate(logs.items()):
            turn = Later(lambda n=name: engine.session(n).turn(tokens=[7, 8, 9], sampling=LONG))
            work.append((turn, [*log, 7, 8, 9]))
            prompt = tokens(30, start=3 + 7 * i)
            work.append((Later(lambda p=prompt: engine.generate(tokens=p, sampling=LONG)), prompt))
        for turn, prompt in work:
            assert list(turn.result().tokens) == oracle(prompt, LONG)
        assert all(engine.session(name).info().pin is not None for name in logs)
        engine.assert_ledger()


def test_what_a_pin_could_not_keep_is_told(tmp_path: Path) -> None:
    with open_engine(engine_config(tmp_path, blocks=BLOCKS)) as engine:
        engine.open("a").pin(tier="device")
        engine.session("a").turn(tokens=tokens(56), sampling=LONG)
        engine.generate(tokens=tokens(BLOCKS * 4 - 4, start=81), sampling=LONG)
        report = engine.session("a").turn(tokens=[7], sampling=LONG).cache
        assert report.cached_tokens == 0
        assert report.miss.reason is MissReason.EVICTED
