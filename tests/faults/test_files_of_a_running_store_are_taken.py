"""Somebody removes, renames or cuts short files of a running store: noticed, told, no signal."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sessionkv.errors import StoreUnavailable
from tests.builders.engine import engine_config, greedy, open_engine

REPLY = greedy(3)
DISK = 2**24


def remove_blocks(store: Path) -> None:
    shutil.rmtree(store / "blocks")


def remove_segments(store: Path) -> None:
    for path in store.glob("blocks/*/segment-*.kv"):
        path.unlink()


def remove_every_file(store: Path) -> None:
    for path in (store / "blocks").rglob("*"):
        if path.is_file():
            path.unlink()


@pytest.mark.parametrize("take", [remove_blocks, remove_segments, remove_every_file])
def test_removed_blocks_are_written_again(
    tmp_path: Path, take: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    store = tmp_path / "store"
    config = engine_config(store, disk_bytes=DISK)
    with open_engine(config) as engine:
        session = engine.open("a")
        session.turn(tokens=list(range(60)), sampling=REPLY)
        engine.flush()
        before = engine.stats()["store"]["blocks"]["blocks"]
        take(store)
        engine.flush()  # nothing was dirty, as far as memory knew
        session.turn(tokens=list(range(40)), sampling=REPLY)
        engine.flush()
        found = engine.stats()["store"]["blocks"]
        assert (found["enabled"], found["reason"]) == (True, "")
        assert found["missing_blocks"] == before
        assert found["blocks"] > before
        # What lies there is what another engine finds, should this one be killed now.
        shutil.copytree(store, tmp_path / "killed")
    said = [r.getMessage() for r in caplog.records if "lost its blocks" in r.getMessage()]
    assert len(said) == 1
    with open_engine(engine_config(tmp_path / "killed", disk_bytes=DISK)) as engine:
        reply = engine.session("a").turn(tokens=[1, 2, 3], sampling=REPLY)
        assert reply.cache.disk_tokens > 90


def test_a_write_notices_it_too(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with open_engine(engine_config(store, disk_bytes=DISK, durability="turn")) as engine:
        session = engine.open("a")
        session.turn(tokens=list(range(60)), sampling=REPLY)
        before = engine.stats()["store"]["blocks"]["blocks"]
        remove_blocks(store)
        session.turn(tokens=list(range(40)), sampling=REPLY)
        engine.flush()
        found = engine.stats()["store"]["blocks"]
        # The tail that the second turn continued may have gone before.
        assert found["missing_blocks"] in (before - 1, before)
        assert found["blocks"] > before


@pytest.mark.parametrize("away", [shutil.rmtree, lambda store: store.rename(store.with_name("b"))])
def test_a_flush_to_a_store_that_is_gone_is_refused(
    tmp_path: Path, away: Callable[[Path], object]
) -> None:
    store = tmp_path / "store"
    with open_engine(engine_config(store, disk_bytes=DISK)) as engine:
        engine.open("a").turn(tokens=list(range(60)), sampling=REPLY)
        engine.flush()
        away(store)
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="removed, renamed") as caught:
                engine.flush()
            assert str(store) in caught.value.message
        found = engine.stats()["store"]["blocks"]
        assert found["enabled"] is False
        assert "removed, renamed" in found["reason"]
    assert not store.exists()


CUT = """
import json, os, sys
from pathlib import Path
from sessionkv.errors import StoreUnavailable
from sessionkv.store.file_guard import FileGuard
from tests.builders.engine import engine_config, greedy, open_engine

REPLY = greedy(3)
found, to_cut = {}, {}
check = FileGuard.check

def cut_and_check(guard):
    # Between two transactions, on the thread that has them: during one nothing would help.
    for path, size in list(to_cut.items()):
        if path.parent == guard._data.path.parent:
            os.truncate(path, size)
            del to_cut[path]
    check(guard)

FileGuard.check = cut_and_check
for number, (pattern, size) in enumerate(json.loads(sys.argv[2])):
    store = Path(sys.argv[1]) / f"store{number}"
    config = engine_config(store, disk_bytes=2**24)
    with open_engine(config) as engine:
        session = engine.open("a")
        session.turn(tokens=list(range(60)), sampling=REPLY)
        engine.flush()
        to_cut.update(dict.fromkeys(store.glob(pattern), size))
        assert to_cut
        told = []
        for _ in range(2):
            try:
                session.turn(tokens=[1, 2, 3], sampling=REPLY)
                engine.flush()
            except StoreUnavailable as error:
                told.append(error.message)
        blocks = engine.stats()["store"]["blocks"]
        assert not to_cut
    found[pattern] = {
        "told": told, "enabled": blocks["enabled"], "missing": blocks["missing_blocks"],
        "blocks": blocks["blocks"],
    }
print(json.dumps(found))
"""


def test_lmdb_files_that_are_cut_short_end_no_process(tmp_path: Path) -> None:
    cases = [
        ("blocks/*/index/data.mdb", 8192),
        ("blocks/*/index/lock.mdb", 0),
        ("journal/data.mdb", 8192),
        ("journal/lock.mdb", 0),
    ]
    argv = [sys.executable, "-c", CUT, str(tmp_path), json.dumps(cases)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for pattern, _ in cases[:2]:
        outcome = found[pattern]
        assert (outcome["told"], outcome["enabled"]) == ([], True)
        assert outcome["missing"] > 0
        assert outcome["blocks"] > 0
    for pattern, _ in cases[2:]:
        told = found[pattern]["told"]
        assert len(told) == 2
        assert all("was cut short by another program" in text for text in told)
