"""When blocks are written: before a turn is answered, after it, before they leave memory, never."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from sessionkv import LimitsConfig
from sessionkv.engine.checksum_runner import checksum_geometry
from tests.builders.checksum import tokens
from tests.builders.doors import Later
from tests.builders.engine import GREEDY, CheckedEngine, engine_config, greedy, open_engine
from tests.builders.store import Gates

DISK = 50_000_000
BLOCK_BYTES = checksum_geometry(4).block_bytes
PROMPT = tokens(13)  # with a reply of 8 that is 20 tokens with KV: 5 blocks


def first_turn(engine: CheckedEngine, name: str = "a", start: int = 0) -> list[int]:
    prompt = tokens(13, start=start)
    return prompt + list(engine.open(name).turn(tokens=prompt, sampling=GREEDY).tokens)


def from_disk(engine: CheckedEngine, name: str = "a") -> int:
    return engine.session(name).turn(tokens=[7], sampling=greedy(1)).cache.disk_tokens


def written(engine: CheckedEngine) -> int:
    return int(engine.stats()["store"]["blocks"]["written_blocks"])


# -- turn


def test_a_turn_is_answered_when_its_blocks_are_on_disk(tmp_path: Path) -> None:
    gates = Gates("before_index_commit")
    config = engine_config(tmp_path, disk_bytes=DISK, durability="turn")
    with open_engine(config, gates=gates) as engine:
        engine.open("a")
        turn = Later(lambda: engine.session("a").turn(tokens=PROMPT, sampling=GREEDY))
        assert gates.reached["before_index_commit"].wait(30)
        # The journal has it: it is the blocks that it waits for.
        assert engine.session("a").info().turns == 1
        assert engine.session("a").info().running
        assert not turn.done
        gates.open("before_index_commit")
        assert len(turn.result().tokens) == 8
        assert written(engine) == 5
        assert engine.stats()["kv"]["device"]["dirty_blocks"] == 0
        engine.session("a").turn(tokens=tokens(6, start=90), sampling=GREEDY)
        assert engine.stats()["kv"]["device"]["dirty_blocks"] == 0
        engine.assert_ledger()


def test_a_disk_that_takes_nothing_holds_no_turn_up(tmp_path: Path) -> None:
    config = engine_config(tmp_path, disk_bytes=1, durability="turn")
    with open_engine(config) as engine:
        assert len(first_turn(engine)) == 21
        assert engine.stats()["kv"]["device"]["dirty_blocks"] == 5
        engine.assert_ledger()


def test_a_disk_that_hangs_holds_a_turn_up_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sessionkv.engine.durability.WRITE_WAIT_S", 0.05)
    gates = Gates("disk_put_half")
    config = engine_config(tmp_path, disk_bytes=DISK, durability="turn")
    with open_engine(config, gates=gates) as engine:
        assert len(first_turn(engine)) == 21
        gates.open("disk_put_half")
        engine.assert_ledger()


# -- evict


def test_what_leaves_memory_is_written_before(tmp_path: Path) -> None:
    config = engine_config(tmp_path, blocks=16, disk_bytes=DISK, durability="evict")
    with open_engine(config) as engine:
        first_turn(engine)
        engine.session("a").info()
        assert written(engine) == 0
        engine.generate(tokens=[200] * 64, sampling=greedy(1))
        assert written(engine) >= 5
        assert from_disk(engine) == 20


@pytest.mark.parametrize("durability", ["turn", "idle", "evict"])
def test_the_end_of_an_engine_writes_what_sessions_want(tmp_path: Path, durability: str) -> None:
    config = engine_config(tmp_path, host_blocks=20, disk_bytes=DISK, durability=durability)
    with open_engine(config) as engine:
        first_turn(engine)
        engine.generate(tokens=[200] * 20, sampling=greedy(1))  # nobody's
    with open_engine(config) as engine:
        assert engine.stats()["store"]["blocks"]["blocks"] == 5
        assert from_disk(engine) == 20


# -- off


def test_without_durability_nothing_is_written_but_on_request(tmp_path: Path) -> None:
    config = engine_config(tmp_path, blocks=10, disk_bytes=DISK, durability="off")
    with open_engine(config) as engine:
        first_turn(engine)
        engine.generate(tokens=[200] * 40, sampling=greedy(1))
        assert written(engine) == 0
        assert engine.session("a").turn(tokens=[7], sampling=greedy(1)).cache.cached_tokens == 0
    with open_engine(config) as engine:
        assert from_disk(engine) == 0
        assert engine.flush() == {"dirty_blocks": 0}
    with open_engine(config) as engine:
        assert from_disk(engine) == 24  # two short turns longer by now


# -- the bound of a drain


def test_a_drain_that_runs_out_of_time_says_what_is_not_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sessionkv.engine.draining.LAST_MOVES_S", 0.05)
    gates = Gates("disk_put_half")
    config = engine_config(tmp_path, disk_bytes=DISK, durability="evict")
    config = replace(config, limits=LimitsConfig(drain_s=0.2))
    with caplog.at_level(logging.WARNING), open_engine(config, gates=gates) as engine:
        first_turn(engine)
        first_turn(engine, "b", start=50)
        closing = Later(engine.close)
        assert gates.reached["disk_put_half"].wait(30)
        until_logged(caplog, "blocks")
        gates.open("disk_put_half")
        closing.result()
    size = 10 * BLOCK_BYTES / 2**20
    assert f"10 blocks ({size:.1f} MiB) of sessions are not on disk after 0.2 s" in caplog.text
    with open_engine(config) as engine:  # slower, never wrong
        assert engine.session("a").info().turns == 1


def until_logged(caplog: pytest.LogCaptureFixture, word: str) -> None:
    for _ in range(3000):
        if word in caplog.text:
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"nothing was logged of {word}: {caplog.text}")
