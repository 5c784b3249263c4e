"""Disks and folders that do not do what they should: the conversation goes on, KV is a cache."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pytest

from sessionkv import EngineConfig
from sessionkv.errors import StoreInUse, StoreUnavailable
from sessionkv.store import environment
from sessionkv.store.directory import disk_bytes
from tests.builders.engine import CheckedEngine, engine_config, greedy, open_engine, oracle

REPLY = greedy(6)
CAP = 2**22
NAMES = ("a", "b", "c")


class Talk:
    """Conversations that know what each answer must be."""

    def __init__(self) -> None:
        self.logs: dict[str, list[int]] = {}

    def turns(self, engine: CheckedEngine, *names: str, length: int = 12) -> None:
        """One turn of each session, each compared with a cold engine's."""
        for name in names:
            log = self.logs.setdefault(name, [])
            start = len(log) + ord(name[0])
            prompt = [*log, *((start + 5 * i) % 200 for i in range(length))]
            session = engine.open(name)
            reply = session.turn(tokens=prompt[len(log) :], sampling=REPLY)
            assert list(reply.tokens) == oracle(prompt, REPLY)
            self.logs[name] = [*prompt, *reply.tokens]

    def check_all_there(self, engine: CheckedEngine) -> None:
        """Sessions are those that were acknowledged, and go on as they should."""
        found = {info.name: info.tokens for info in engine.sessions()}
        assert found == {name: len(log) for name, log in self.logs.items()}
        self.turns(engine, *self.logs)


@pytest.fixture
def talk() -> Talk:
    return Talk()


def config_of(path: Path, **fields: Any) -> EngineConfig:
    """Device and host too small for the conversations, so that the disk is asked all the time."""
    return engine_config(path, **{"blocks": 40, "host_blocks": 8, "disk_bytes": CAP} | fields)


def warnings(log: pytest.LogCaptureFixture, words: str) -> int:
    """How often something that says so was logged."""
    return sum(words in record.getMessage() for record in log.records)


def disk(engine: CheckedEngine) -> dict[str, Any]:
    """Figures of the disk tier, as of when it has answered all."""
    engine.flush()
    found: dict[str, Any] = engine.stats()["store"]["blocks"]
    return found


class BadDisk:
    """System calls on segment files that fail with one error while ``code`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.code = 0
        self.calls = 0
        for name in ("posix_fallocate", "pwritev", "fdatasync"):
            self._spoil(monkeypatch, name)

    def _spoil(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        real = getattr(os, name)

        def call(fd: int, *arguments: Any) -> Any:
            if self.code and os.readlink(f"/proc/self/fd/{fd}").endswith(".kv"):
                self.calls += 1
                raise OSError(self.code, os.strerror(self.code))
            return real(fd, *arguments)

        monkeypatch.setattr(os, name, call)


@pytest.fixture
def bad_disk(monkeypatch: pytest.MonkeyPatch) -> BadDisk:
    monkeypatch.setattr("sessionkv.store.block_store._RETRY_S", 0.0)
    return BadDisk(monkeypatch)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_disk_that_takes_nothing_says_so_once_and_is_used_again(
    tmp_path: Path, talk: Talk, bad_disk: BadDisk, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    with open_engine(config_of(tmp_path / "store")) as engine:
        talk.turns(engine, *NAMES)
        assert disk(engine)["enabled"]
        kept = disk(engine)["blocks"]
        bad_disk.code = code
        for _ in range(3):
            talk.turns(engine, *NAMES)
        stats = disk(engine)
        if not stats["enabled"]:  # a full disk may be lived with: blocks make room for blocks
            assert stats["reason"]
            assert warnings(caplog, "takes no blocks for now") == 1
        bad_disk.code = 0
        talk.turns(engine, *NAMES, "d")
        stats = disk(engine)
        assert (stats["enabled"], stats["reason"]) == (True, "")
        assert stats["blocks"] > kept
        assert warnings(caplog, "takes no blocks for now") == warnings(caplog, "is on again") <= 1
        talk.check_all_there(engine)
        engine.assert_ledger()
    assert bad_disk.calls
    with open_engine(config_of(tmp_path / "store")) as engine:
        talk.check_all_there(engine)


def test_reads_that_fail_are_computed(
    tmp_path: Path, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(config_of(tmp_path / "store")) as engine:
        talk.turns(engine, *NAMES)
    real = os.preadv

    def preadv(fd: int, *arguments: Any) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".kv"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, *arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    with open_engine(config_of(tmp_path / "store")) as engine:
        talk.check_all_there(engine)
        assert disk(engine)["io_errors"] > 0
        engine.assert_ledger()
        monkeypatch.setattr(os, "preadv", real)
        talk.check_all_there(engine)


@pytest.mark.parametrize("cap_bytes", [1, 4096, 80_000])
def test_a_cap_below_one_record_turns_the_tier_off_once(
    tmp_path: Path, talk: Talk, caplog: pytest.LogCaptureFixture, cap_bytes: int
) -> None:
    """Blocks are not offered for ever to a tier that will never take one."""
    with open_engine(config_of(tmp_path / "store", disk_bytes=cap_bytes)) as engine:
        for _ in range(3):
            talk.turns(engine, *NAMES)
        stats = engine.stats()
        assert warnings(caplog, "no room for a record") == 1
        assert not any("disk" in name for name in stats["transfers"]), stats["transfers"]
        assert stats["store"]["disk_off"].startswith("the cap of")
        engine.assert_ledger()
    with open_engine(config_of(tmp_path / "store")) as engine:
        talk.check_all_there(engine)
        assert disk(engine)["blocks"] > 0
        assert engine.stats()["store"]["disk_off"] == ""


def test_a_cap_that_was_lowered_holds_and_the_sessions_go_on(tmp_path: Path, talk: Talk) -> None:
    path = tmp_path / "store"
    for cap_bytes in (CAP, CAP // 4, CAP // 8, CAP):
        with open_engine(config_of(path, blocks=64, disk_bytes=cap_bytes)) as engine:
            assert disk_bytes(path / "blocks") <= cap_bytes
            talk.check_all_there(engine)
            talk.turns(engine, *NAMES, length=30)
            deadline = time.monotonic() + 30  # figures are of when the disk was last at rest
            while disk(engine)["used_bytes"] != disk_bytes(path / "blocks"):
                assert time.monotonic() < deadline
            assert disk(engine)["enabled"]
            assert disk_bytes(path / "blocks") <= cap_bytes
            engine.assert_ledger()


def test_a_map_that_cannot_grow_is_a_full_disk(
    tmp_path: Path, talk: Talk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both maps: a turn is refused in words and its session stays; blocks are not written."""
    path = tmp_path / "store"
    with open_engine(config_of(path)) as engine:
        talk.turns(engine, *NAMES)
    monkeypatch.setattr(environment, "_MAP_LIMIT_BYTES", 0)
    real = lmdb.open

    def small(where: str, map_size: int, **fields: Any) -> lmdb.Environment:
        size = max(4096 * 24, (Path(where) / "data.mdb").stat().st_size + 4096 * 8)
        return real(where, map_size=size, **fields)

    monkeypatch.setattr(environment.lmdb, "open", small)
    refused = 0
    with open_engine(config_of(path)) as engine:
        for number in range(100):
            try:
                talk.turns(engine, f"n{number}")
            except StoreUnavailable:
                refused += 1
                found = {info.name: info.tokens for info in engine.sessions()}
                talk.logs = {name: log for name, log in talk.logs.items() if log or name in found}
                assert found == {name: len(log) for name, log in talk.logs.items()}
            if refused > 2:
                break
        assert refused
        assert warnings(caplog, "takes no blocks for now") <= 1
    monkeypatch.undo()
    with open_engine(config_of(path)) as engine:
        talk.check_all_there(engine)
        assert disk(engine)["enabled"]


@pytest.mark.parametrize("there_and_back", ["block_size", "weights"])
def test_a_store_of_another_kind_of_block_keeps_the_sessions(
    tmp_path: Path, talk: Talk, there_and_back: str
) -> None:
    path = tmp_path / "store"
    with open_engine(config_of(path)) as engine:
        talk.turns(engine, *NAMES)
        assert disk(engine)["blocks"] > 0
    other: dict[str, Any] = {"block_size": 8} if there_and_back == "block_size" else {}
    runner = {} if other else {"fingerprint": "other"}
    with open_engine(config_of(path, **other), runner=runner) as engine:
        found = {info.name: info.tokens for info in engine.sessions()}
        assert found == {name: len(log) for name, log in talk.logs.items()}
        prompt = [*talk.logs["a"], 1, 2, 3]
        reply = engine.session("a").turn(tokens=[1, 2, 3], sampling=REPLY)
        assert list(reply.tokens) == oracle(prompt, REPLY, **runner)
        assert reply.cache.disk_tokens == 0
        talk.logs["a"] = [*prompt, *reply.tokens]
        assert disk(engine)["foreign_bytes"] > 0
        engine.assert_ledger()
    with open_engine(config_of(path)) as engine:
        reply = engine.session("b").turn(tokens=[1], sampling=REPLY)
        assert reply.cache.disk_tokens > 0
        assert list(reply.tokens) == oracle([*talk.logs["b"], 1], REPLY)


def test_a_live_lock_is_respected_and_a_stale_one_is_not(tmp_path: Path, talk: Talk) -> None:
    path = tmp_path / "store"
    with open_engine(config_of(path)) as engine:
        talk.turns(engine, *NAMES)
        with pytest.raises(StoreInUse, match=str(os.getpid())), open_engine(config_of(path)):
            pass
        talk.check_all_there(engine)
    for left in (b"", b"1\n", b"4194304\n", b"not a pid", bytes(4096)):
        (path / "lock").write_bytes(left)
        with open_engine(config_of(path)) as engine:
            talk.check_all_there(engine)


@pytest.mark.parametrize("words", ["sessionkv-store 999\n", "sessionkv-store x\n", "", "another"])
def test_a_format_that_is_not_known_is_left_alone(tmp_path: Path, talk: Talk, words: str) -> None:
    path = tmp_path / "store"
    with open_engine(config_of(path)) as engine:
        talk.turns(engine, *NAMES)
    right = (path / "format").read_bytes()
    (path / "format").write_text(words)
    before = tree_of(path)
    with pytest.raises(StoreUnavailable) as caught, open_engine(config_of(path)):
        pass
    assert str(path) in str(caught.value)
    assert tree_of(path) == before
    (path / "format").write_bytes(right)
    with open_engine(config_of(path)) as engine:
        talk.check_all_there(engine)


def tree_of(path: Path) -> dict[str, bytes]:
    """Every file but those that only say who is there."""
    return {
        str(item.relative_to(path)): item.read_bytes()
        for item in sorted(path.rglob("*"))
        if item.is_file() and item.name not in ("lock", "lock.mdb")
    }


def remove_blocks(path: Path) -> None:
    (path / "blocks").rename(path.parent / "gone")


def remove_segments(path: Path) -> None:
    for segment in path.glob("blocks/*/segment-*.kv"):
        segment.unlink()


def remove_index(path: Path) -> None:
    for index in path.glob("blocks/*/index"):
        index.rename(path.parent / "index")


@pytest.mark.parametrize("remove", [remove_blocks, remove_segments, remove_index])
def test_blocks_that_are_removed_while_in_use(
    tmp_path: Path, talk: Talk, caplog: pytest.LogCaptureFixture, remove: Callable[[Path], None]
) -> None:
    path = tmp_path / "store"
    with open_engine(config_of(path)) as engine:
        talk.turns(engine, *NAMES)
        engine.flush()
        remove(path)
        for _ in range(3):
            talk.turns(engine, *NAMES, "d")
        engine.assert_ledger()
        assert sum(record.levelno >= logging.WARNING for record in caplog.records) <= 2
    with open_engine(config_of(path)) as engine:
        talk.check_all_there(engine)
        assert disk(engine)["enabled"]


def test_everything_is_private_whatever_the_umask(tmp_path: Path, talk: Talk) -> None:
    path = tmp_path / "deep" / "store"
    before = os.umask(0)
    try:
        for _ in range(2):
            with open_engine(config_of(path)) as engine:
                talk.turns(engine, *NAMES)
                engine.flush()
                modes = {item: item.stat().st_mode & 0o777 for item in (path, *path.rglob("*"))}
    finally:
        os.umask(before)
    assert len(modes) > 8
    for item, mode in modes.items():
        assert mode == (0o700 if item.is_dir() else 0o600), item


def test_engines_without_a_disk_tier_keep_what_is_there(tmp_path: Path, talk: Talk) -> None:
    path = tmp_path / "store"
    with open_engine(config_of(path)) as engine:
        talk.turns(engine, *NAMES)
        kept = disk(engine)["blocks"]
    config = config_of(path, disk_bytes=0)
    for changed in (config, replace(config, cache=replace(config.cache, prefix_cache=False))):
        with open_engine(changed) as engine:
            talk.check_all_there(engine)
    with open_engine(config_of(path)) as engine:
        assert disk(engine)["blocks"] == kept
        talk.check_all_there(engine)
