"""Sessions that are not in memory: found by name, listed, run, deleted, and told when damaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from sessionkv import LimitsConfig
from sessionkv.engine import housekeeping
from sessionkv.errors import (
    DeadlineExceeded,
    SessionDamaged,
    SessionExists,
    SessionNotFound,
)
from sessionkv.store.journal_records import node_key
from sessionkv.store.journal_tables import NUM_DATABASES
from sessionkv.types import Tier
from tests.builders.checksum import tokens
from tests.builders.doors import Later
from tests.builders.engine import GREEDY, CheckedEngine, engine_config, open_engine, oracle
from tests.builders.store import Gates

NAMES = [f"s{i:02}" for i in range(20)]


def turn(engine: CheckedEngine, name: str, ids: list[int], **options: object) -> list[int]:
    return list(engine.session(name).turn(tokens=ids, sampling=GREEDY, **options).tokens)


def fill(engine: CheckedEngine, names: list[str] = NAMES) -> dict[str, list[int]]:
    """Sessions of one turn each; their logs."""
    logs = {}
    for i, name in enumerate(names):
        engine.open(name)
        prompt = tokens(9, start=i)
        logs[name] = prompt + turn(engine, name, prompt)
    return logs


def loaded(engine: CheckedEngine) -> int:
    return int(engine.stats()["store"]["loaded_sessions"])


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """No session stays in memory that need not."""
    monkeypatch.setattr(housekeeping, "MEMORY_BYTES", 0)


def test_a_start_takes_in_nothing_and_each_session_as_it_is_used(tmp_path: Path) -> None:
    config = engine_config(tmp_path, blocks=256, disk_bytes=50_000_000)
    with open_engine(config) as engine:
        logs = fill(engine)
        engine.flush()
    with open_engine(config) as engine:
        stats = engine.stats()["store"]
        assert (stats["loaded_sessions"], stats["nodes"]) == (0, 40)
        assert [info.name for info in engine.sessions()] == NAMES
        assert {info.tokens for info in engine.sessions()} == {17}
        assert loaded(engine) == 0
        for count, (name, log) in enumerate(logs.items(), 1):
            result = engine.session(name).turn(tokens=[7], sampling=GREEDY)
            assert list(result.tokens) == oracle([*log, 7])
            assert result.cache.disk_tokens == 16
            assert loaded(engine) == count
        with pytest.raises(SessionNotFound):
            engine.session("nobody").info()
        engine.assert_ledger()


def test_names_in_the_journal_are_taken(tmp_path: Path) -> None:
    config = engine_config(tmp_path, blocks=256)
    with open_engine(config) as engine:
        fill(engine, ["a", "b"])
    with open_engine(config) as engine:
        with pytest.raises(SessionExists):
            engine.session("a").fork("b")
        assert engine.open("b").info().turns == 1
        engine.delete("a")
        with pytest.raises(SessionNotFound):
            engine.delete("a")
        assert engine.open("a").info().turns == 0
        assert [info.name for info in engine.sessions()] == ["a", "b"]


@pytest.mark.usefixtures("no_room")
def test_sessions_leave_memory_when_their_blocks_have_and_come_back(tmp_path: Path) -> None:
    """A pool of a few sessions' blocks: of the others nothing is kept in memory."""
    config = engine_config(tmp_path, blocks=32, disk_bytes=50_000_000)
    with open_engine(config) as engine:
        logs = fill(engine)
        for name in NAMES[:3]:
            engine.session(name).fork(f"{name}-fork")
        engine.flush()
        for round_number in range(3):
            for name, log in logs.items():
                assert (info := engine.session(name).info()).tokens == len(log)
                assert info.turns == round_number + 1
                reply = turn(engine, name, [5])
                assert reply == oracle([*log, 5])
                log += [5, *reply]
        await_at_most(engine, 8)
        for name in NAMES[:3]:
            info = engine.session(f"{name}-fork").info()
            assert (info.turns, info.tokens) == (1, 17)
            engine.delete(name)
            assert engine.session(f"{name}-fork").info().turns == 1
        for name in NAMES[3:]:
            engine.delete(name)
        for name in NAMES[:3]:
            engine.delete(f"{name}-fork")
        assert engine.sessions() == []
        assert engine.stats()["store"]["nodes"] == 0
        engine.assert_ledger()
        assert engine.parts.tree.retention.num_keys == 0


def await_at_most(engine: CheckedEngine, count: int) -> None:
    """Wait until so few sessions are in memory."""
    for _ in range(10_000):  # each question is a round through the core
        if loaded(engine) <= count:
            return
    raise AssertionError(f"{loaded(engine)} sessions are in memory")


@pytest.mark.usefixtures("no_room")
def test_pinned_sessions_come_in_by_themselves_and_stay(tmp_path: Path) -> None:
    config = engine_config(tmp_path, blocks=256, disk_bytes=50_000_000)
    with open_engine(config) as engine:
        fill(engine)
        engine.flush()
        for name in NAMES[3:6]:
            engine.session(name).pin(tier="disk")
        pinned = engine.parts.tree.retention.pinned_bytes(Tier.DISK)
        assert pinned > 0
    with open_engine(config) as engine:
        for _ in range(10_000):
            if loaded(engine) == 3:
                break
        retention = engine.parts.tree.retention
        assert retention.pinned_bytes(Tier.DISK) == pinned
        assert [info.name for info in engine.sessions() if info.pin] == NAMES[3:6]
        for name in NAMES[3:6]:
            engine.session(name).unpin()
        await_at_most(engine, 0)
        assert (retention.pinned_bytes(Tier.DISK), retention.num_keys) == (0, 0)


def test_keys_are_asked_of_the_journal_and_run_out(tmp_path: Path) -> None:
    limits = LimitsConfig(idempotency_keys=3)
    config = engine_config(tmp_path, blocks=256, limits=limits)
    with open_engine(config) as engine:
        engine.open("a")
        first = [turn(engine, "a", [i], idempotency_key=f"k{i}") for i in range(5)]
        assert engine.session("a").info().turns == 5
    with open_engine(config) as engine:
        for i in (2, 3, 4):
            assert turn(engine, "a", [i], idempotency_key=f"k{i}") == first[i]
        assert engine.session("a").info().turns == 5
        turn(engine, "a", [0], idempotency_key="k0")
        assert engine.session("a").info().turns == 6
        assert engine.parts.store.journal_figures().num_keys == 3


def test_a_turn_that_waits_for_its_session_can_end_before_it_began(tmp_path: Path) -> None:
    config = engine_config(tmp_path, blocks=256)
    with open_engine(config) as engine:
        logs = fill(engine, ["a", "b"])
    gates = Gates("before_commit")
    with open_engine(config, gates=gates) as engine:
        opening = Later(lambda: engine.open("new"))
        try:
            assert gates.reached["before_commit"].wait(30)
            assert engine.session("a").stream(tokens=[1], sampling=GREEDY).cancel() is None
            with pytest.raises(DeadlineExceeded):
                turn(engine, "a", [1], deadline_s=0.05)
            late = Later(lambda: turn(engine, "b", [1]))
        finally:
            gates.open("before_commit")
        opening.result()
        assert late.result() == oracle([*logs["b"], 1])
        assert engine.session("a").info().turns == 1
        engine.assert_ledger()


def test_a_damaged_turn_is_told_of_its_session_and_harms_no_other(tmp_path: Path) -> None:
    config = engine_config(tmp_path, blocks=256)
    with open_engine(config) as engine:
        logs = fill(engine, ["broken", "whole"])
        engine.session("broken").fork("fork")
        turn(engine, "broken", [1])
        broken = int(engine.session("broken").info().node.removeprefix("n-"))
    path = str(tmp_path / "journal")
    with lmdb.open(path, max_dbs=NUM_DATABASES) as env, env.begin(write=True) as txn:
        nodes = env.open_db(b"nodes", txn=txn)
        value = bytearray(txn.get(node_key(broken), db=nodes))
        value[20] ^= 4
        txn.put(node_key(broken), bytes(value), db=nodes)
    with open_engine(config) as engine:
        for use in (
            lambda: engine.open("broken"),
            lambda: engine.session("broken").info(),
            lambda: turn(engine, "broken", [1]),
            lambda: engine.session("whole").fork("broken"),
        ):
            with pytest.raises(SessionDamaged, match=f"turn n-{broken} is damaged"):
                use()
        assert engine.stats()["store"]["damaged_records"] == 1
        assert turn(engine, "fork", [2]) == oracle([*logs["broken"], 2])
        assert turn(engine, "whole", [2]) == oracle([*logs["whole"], 2])
        assert [info.name for info in engine.sessions()] == ["broken", "fork", "whole"]
        engine.delete("broken")
        with pytest.raises(SessionNotFound):
            engine.session("broken").info()
        engine.open("broken")
        assert engine.session("broken").info().turns == 0
        engine.assert_ledger()
    with open_engine(replace(config)) as engine:
        assert [info.name for info in engine.sessions()] == ["broken", "fork", "whole"]
        assert engine.stats()["store"]["damaged_records"] == 0


def test_deleting_keeps_what_sessions_on_disk_alone_share(tmp_path: Path) -> None:
    """Two sessions of one beginning, opened apart; of the other one memory knows nothing."""
    config = engine_config(tmp_path, blocks=256, disk_bytes=50_000_000)
    begin = tokens(16)
    with open_engine(config) as engine:
        logs = {}
        for name, own in (("a", 1), ("b", 2)):
            engine.open(name)
            logs[name] = [*begin, own, *turn(engine, name, [*begin, own])]
        engine.flush()
    with open_engine(config) as engine:
        engine.delete("a")
        engine.flush()
        result = engine.session("b").turn(tokens=[3], sampling=GREEDY)
        assert list(result.tokens) == oracle([*logs["b"], 3])
        assert result.cache.disk_tokens == 24
        engine.delete("b")
        engine.assert_ledger()
    with open_engine(config) as engine:
        assert engine.stats()["store"]["blocks"]["blocks"] == 0
