"""What each tier holds, by switch: off, on eviction, when idle, on request, pinned."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sessionkv import MissReason
from sessionkv.engine.checksum_runner import checksum_geometry
from sessionkv.errors import PinRefused
from tests.builders.checksum import tokens
from tests.builders.engine import (
    GREEDY,
    CheckedEngine,
    engine_config,
    greedy,
    open_engine,
    oracle,
    without_cache,
)

DISK = 50_000_000
BLOCK_BYTES = checksum_geometry(4).block_bytes
PROMPT = tokens(13)  # with a reply of 8 that is 20 tokens with KV: 5 blocks


def first_turn(engine: CheckedEngine, name: str = "a", start: int = 0) -> list[int]:
    prompt = tokens(13, start=start)
    result = engine.open(name).turn(tokens=prompt, sampling=GREEDY)
    assert list(result.tokens) == oracle(prompt)
    return prompt + list(result.tokens)


def other(engine: CheckedEngine, number: int, num_blocks: int = 5) -> None:
    """A generation that leaves so many blocks of its own, which nobody retains."""
    engine.generate(tokens=[200 + number] * (4 * num_blocks), sampling=greedy(1))


def tiers(engine: CheckedEngine, log: list[int], name: str = "a") -> tuple[int, int, int]:
    """Where the next turn's history came from; it is right in any case, and taken back again."""
    session = engine.session(name)
    result = session.turn(tokens=[7], sampling=greedy(1))
    assert list(result.tokens) == oracle([*log, 7], greedy(1))
    session.rewind()
    report = result.cache
    return report.device_tokens, report.host_tokens, report.disk_tokens


def eventually(holds: Callable[[], bool]) -> None:
    """Wait for something that the engine does by itself, when it is idle."""
    for _ in range(3000):
        if holds():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never came about")


def written(engine: CheckedEngine) -> int:
    return int(engine.stats()["store"]["blocks"]["written_blocks"])


# -- off


def test_without_prefix_cache_nothing_is_kept_anywhere(tmp_path: Path) -> None:
    config = engine_config(tmp_path, host_blocks=40, disk_bytes=DISK)
    with open_engine(without_cache(config)) as engine:
        log = first_turn(engine)
        assert tiers(engine, log) == (0, 0, 0)
        engine.flush()
        stats = engine.stats()
        assert stats["ledger"]["device"]["cached"] == 0
        assert [stats["kv"][tier]["cap_bytes"] for tier in ("host", "disk")] == [0, 0]
        assert stats["store"]["blocks"] is None
        engine.assert_ledger()
    assert not list((tmp_path / "blocks").rglob("segment-*"))
    with open_engine(without_cache(config)) as engine:  # the log is there all the same
        assert tiers(engine, log) == (0, 0, 0)


def test_without_lower_tiers_what_is_evicted_is_gone() -> None:
    with open_engine(engine_config(blocks=10)) as engine:
        log = first_turn(engine)
        other(engine, 1, 10)
        assert tiers(engine, log) == (0, 0, 0)
        assert engine.flush() == {"dirty_blocks": 0}
        assert engine.stats()["transfers"] == {}
        engine.assert_ledger()


def test_without_disk_the_host_is_the_last_tier(tmp_path: Path) -> None:
    config = engine_config(tmp_path, blocks=10, host_blocks=20)
    with open_engine(config) as engine:
        log = first_turn(engine)
        other(engine, 1, 10)
        assert tiers(engine, log) == (0, 20, 0)
        engine.assert_ledger()
    with open_engine(config) as engine:
        assert tiers(engine, log) == (0, 0, 0)


# -- durability


def test_idle_sessions_are_written_by_themselves(tmp_path: Path) -> None:
    with open_engine(engine_config(tmp_path, disk_bytes=DISK)) as engine:
        first_turn(engine)
        eventually(lambda: written(engine) == 5)
        other(engine, 1)  # nobody's: it reaches the disk by eviction only
        engine.session("a").turn(tokens=[7, 8, 9, 10], sampling=GREEDY)
        eventually(lambda: written(engine) == 5 + 3)
        engine.assert_ledger()


def test_flush_returns_when_all_of_it_is_on_disk(tmp_path: Path) -> None:
    config = engine_config(tmp_path, blocks=200, disk_bytes=DISK, durability="off")
    with open_engine(config) as engine:
        logs = [first_turn(engine, str(i), i) for i in range(20)]
        assert engine.flush() == {"dirty_blocks": 0}
        stored = engine.stats()["store"]["blocks"]["blocks"]
        assert stored == len(engine.parts.kv.resident_keys())
    with open_engine(config) as engine:
        for i, log in enumerate(logs):
            assert tiers(engine, log, str(i))[2] == 20


# -- what is asked of the disk


def test_a_resident_session_asks_nothing_of_the_disk(tmp_path: Path) -> None:
    with open_engine(engine_config(tmp_path, disk_bytes=DISK)) as engine:
        first_turn(engine)
        lookups = engine.stats()["store"]["blocks"]["lookups"]
        for _ in range(5):
            engine.session("a").turn(tokens=[7, 8, 9, 10, 11], sampling=greedy(3))
        engine.flush()
        assert engine.stats()["store"]["blocks"]["lookups"] == lookups == 1


def test_the_start_of_a_history_in_memory_hides_none_of_it_on_disk(tmp_path: Path) -> None:
    config = engine_config(tmp_path, disk_bytes=DISK)
    with open_engine(config) as engine:
        log = first_turn(engine)
    for length in range(1, 20):
        with open_engine(config) as engine:
            engine.generate(tokens=log[:length], sampling=greedy(1))
            report = engine.session("a").turn(tokens=[7], sampling=greedy(1)).cache
            assert report.device_tokens >= length // 4 * 4
            assert report.cached_tokens >= 20
            assert report.miss.reason is MissReason.NONE
            engine.session("a").rewind()


# -- pins


@pytest.mark.parametrize(("taken", "left"), [(6, "abcd"), (11, "abd"), (16, "ab"), (21, "a")])
def test_pinned_sessions_leave_the_device_last_and_by_priority(taken: int, left: str) -> None:
    with open_engine(engine_config(blocks=26)) as engine:
        for i, name in enumerate("abcd"):
            first_turn(engine, name, 40 * i)
        engine.session("a").pin(tier="device", priority=70)
        engine.session("b").pin(tier="device", priority=20)
        other(engine, 1, taken)  # six blocks are free; c is retained, as d is, and longer unused
        assert [name for name in "abcd" if is_whole_in(engine, name, "device")] == list(left)
        engine.assert_ledger()


def is_whole_in(engine: CheckedEngine, name: str, tier: str) -> bool:
    found = engine.session(name).info().bytes[tier]
    return found.exclusive + found.shared == 5 * BLOCK_BYTES


def test_pinned_sessions_leave_the_host_last_and_by_priority() -> None:
    with open_engine(engine_config(blocks=8, host_blocks=16)) as engine:
        logs = {name: first_turn(engine, name, 40 * i) for i, name in enumerate("abc")}
        other(engine, 1, 8)
        engine.session("a").pin(tier="host", priority=70)
        for i in range(4):
            first_turn(engine, f"more {i}", 200 + 40 * i)
            other(engine, 2 + i, 8)
        assert tiers(engine, logs["c"], "c")[1] < 20
        assert tiers(engine, logs["a"], "a") == (0, 20, 0)
        engine.assert_ledger()


def test_what_is_pinned_in_a_full_host_makes_no_room_for_what_is_not() -> None:
    with open_engine(engine_config(blocks=8, host_blocks=7)) as engine:
        log = first_turn(engine)
        other(engine, 1, 8)
        engine.session("a").pin(tier="host")
        for i in range(4):
            first_turn(engine, f"more {i}", 200 + 40 * i)
            other(engine, 2 + i, 8)
        assert tiers(engine, log) == (0, 20, 0)
        engine.assert_ledger()


def test_sessions_pinned_on_disk_outlive_others_there(tmp_path: Path) -> None:
    config = engine_config(tmp_path, blocks=12, disk_bytes=600_000)
    with open_engine(config) as engine:
        logs = {name: first_turn(engine, name, i) for i, name in enumerate("ab")}
        engine.session("a").pin(tier="disk")
        for i in range(2, 60):
            first_turn(engine, f"more {i}", i)
        engine.flush()
        blocks = engine.stats()["store"]["blocks"]
        assert blocks["evicted_blocks"] > blocks["blocks"]  # more than once around
        assert tiers(engine, logs["a"], "a") == (0, 0, 20)
        assert tiers(engine, logs["b"], "b") == (0, 0, 0)
        engine.assert_ledger()


def test_a_pin_that_ran_out_no_longer_holds_back() -> None:
    with open_engine(engine_config(blocks=16)) as engine:
        log = first_turn(engine)
        session = engine.session("a")
        session.pin(tier="device", ttl_s=3600.0)
        for i in range(4):
            first_turn(engine, f"more {i}", 40 + 40 * i)
        assert tiers(engine, log) == (20, 0, 0)
        session.pin(tier="device", ttl_s=0.001)
        eventually(lambda: session.info().pin is None)
        for i in range(4, 8):
            first_turn(engine, f"more {i}", 40 + 40 * i)
        report = session.turn(tokens=[7], sampling=greedy(1)).cache
        assert report.cached_tokens == 0
        assert (report.miss.reason, report.miss.token) == (MissReason.EXPIRED, 0)


def test_pins_are_refused_past_80_percent_of_the_tier() -> None:
    with open_engine(engine_config(blocks=15)) as engine:
        for i in range(3):
            first_turn(engine, str(i), 40 * i)
        engine.session("0").pin(tier="device")
        engine.session("1").pin(tier="device")
        with pytest.raises(PinRefused) as raised:
            engine.session("2").pin(tier="device")
        assert raised.value.details == {
            "tier": "device",
            "needed_bytes": 15 * BLOCK_BYTES,
            "allowed_bytes": 12 * BLOCK_BYTES,
        }
        assert engine.session("2").info().pin is None
        with pytest.raises(PinRefused):
            engine.session("2").pin(tier="host")
        engine.session("0").unpin()
        assert engine.session("2").pin(tier="device").pin is not None


# -- bytes


def test_bytes_of_sessions_sum_to_what_is_held(tmp_path: Path) -> None:
    config = engine_config(tmp_path, blocks=100, host_blocks=50, disk_bytes=DISK)
    with open_engine(config) as engine:
        session = engine.open("a")
        session.turn(tokens=tokens(12), sampling=greedy(1))
        for name in ("b", "c"):
            session.fork(name)
            engine.session(name).turn(tokens=[*tokens(8, start=30), ord(name)], sampling=greedy(1))
        engine.open("d").turn(tokens=tokens(9, start=60), sampling=greedy(1))
        engine.flush()
        infos = {info.name: engine.session(info.name).info().bytes for info in engine.sessions()}
        for tier in ("device", "disk"):
            exclusive = {n: found[tier].exclusive // BLOCK_BYTES for n, found in infos.items()}
            shared = {n: found[tier].shared // BLOCK_BYTES for n, found in infos.items()}
            # b and c differ in their last block only, and both begin with all of a.
            assert exclusive == {"a": 0, "b": 1, "c": 1, "d": 3}
            assert shared == {"a": 3, "b": 5, "c": 5, "d": 0}
        held = sum(exclusive.values()) + 5
        assert len(engine.parts.kv.resident_keys()) == held
        assert engine.stats()["kv"]["device"]["used_bytes"] == held * BLOCK_BYTES
        assert engine.stats()["store"]["blocks"]["blocks"] == held


# -- clean ahead of need


@pytest.mark.parametrize(("host_blocks", "disk_bytes"), [(60, 0), (0, DISK), (60, DISK)])
def test_under_steady_pressure_no_eviction_waits(
    tmp_path: Path, host_blocks: int, disk_bytes: int
) -> None:
    config = engine_config(tmp_path, blocks=40, host_blocks=host_blocks, disk_bytes=disk_bytes)
    with open_engine(config) as engine:
        for i in range(30):
            first_turn(engine, str(i), 13 * i)
            eventually(lambda: engine.stats()["ledger"]["transfers_in_flight"] == 0)
        for tier in ("device", "host"):
            kv = engine.stats()["kv"][tier]
            assert kv["evictions_waited"] == 0
            assert (kv["clean_blocks"] + kv["dirty_blocks"]) * BLOCK_BYTES == kv["used_bytes"]
        assert engine.stats()["kv"]["device"]["evictions"] > 30
        engine.assert_ledger()
