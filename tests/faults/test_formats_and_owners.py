"""Stores of an older or a newer format, and stores that this user may not write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lmdb
import msgpack
import pytest

from sessionkv.errors import StoreUnavailable
from sessionkv.store.journal_records import sealed
from tests.builders.engine import CheckedEngine, engine_config, greedy, open_engine, oracle

ROOT = Path(__file__).resolve().parents[2]
REPLY = greedy(4)
PROMPT = [5 * i % 200 for i in range(30)]
NOBODY = 65_534


def change(path: Path, database: bytes, key: bytes, value: bytes | None) -> None:
    """Set or remove one row of an LMDB file."""
    with lmdb.open(str(path), max_dbs=12, map_size=2**30) as env:
        opened = env.open_db(database)
        with env.begin(write=True) as txn:
            if value is None:
                txn.delete(key, db=opened)
            else:
                txn.put(key, value, db=opened)


def talk(engine: CheckedEngine, log: list[int]) -> int:
    """One turn of the one session; how many of its tokens came from the disk."""
    tokens = [7, len(log) % 200, *(PROMPT if not log else ())]
    prompt = [*log, *tokens]
    reply = engine.open("trip").turn(tokens=tokens, sampling=REPLY)
    assert list(reply.tokens) == oracle(prompt, REPLY)
    log[:] = [*prompt, *reply.tokens]
    return int(reply.cache.disk_tokens)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def log(store: Path) -> list[int]:
    """Of a session of two turns in a store with blocks."""
    log: list[int] = []
    with open_engine(engine_config(store, disk_bytes=2**22)) as engine:
        talk(engine, log)
        talk(engine, log)
    return log


def test_a_journal_of_the_first_format_is_brought_up(store: Path, log: list[int]) -> None:
    (store / "format").write_text("sessionkv-store 1\n")
    change(store / "journal", b"meta", b"version", None)
    for _ in range(2):
        with open_engine(engine_config(store, disk_bytes=2**22)) as engine:
            assert [(info.name, info.tokens) for info in engine.sessions()] == [("trip", len(log))]
            assert talk(engine, log) > 0
        assert (store / "format").read_text() == "sessionkv-store 3\n"


def test_a_journal_of_a_newer_format_is_left_alone(store: Path, log: list[int]) -> None:
    change(store / "journal", b"meta", b"version", sealed([4]))
    before = (store / "journal" / "data.mdb").read_bytes()
    with (
        pytest.raises(StoreUnavailable, match="version 4") as caught,
        open_engine(engine_config(store, disk_bytes=2**22)),
    ):
        pass
    assert str(store) in str(caught.value)
    assert (store / "journal" / "data.mdb").read_bytes() == before
    change(store / "journal", b"meta", b"version", sealed([2]))
    with open_engine(engine_config(store, disk_bytes=2**22)) as engine:
        assert talk(engine, log) > 0


@pytest.mark.parametrize("version", [1, 3])
def test_blocks_of_another_format_make_place_for_new_ones(
    store: Path, log: list[int], version: int
) -> None:
    (index,) = store.glob("blocks/*/index")
    with lmdb.open(str(index), max_dbs=12, map_size=2**30) as env, env.begin() as txn:
        layout = msgpack.unpackb(txn.get(b"layout", db=env.open_db(b"meta", txn=txn)))
    change(index, b"meta", b"layout", msgpack.packb(layout | {"version": version}))
    with open_engine(engine_config(store, disk_bytes=2**22)) as engine:
        assert talk(engine, log) == 0
    with open_engine(engine_config(store, disk_bytes=2**22)) as engine:
        assert talk(engine, log) > 0


PROGRAM = """
import json, os, sys
store, user = sys.argv[1], int(sys.argv[2])
from pathlib import Path
from sessionkv.errors import StoreUnavailable
from tests.builders.engine import engine_config, open_engine
if user:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
try:
    with open_engine(engine_config(Path(store), disk_bytes=2**22)) as engine:
        said = [info.tokens for info in engine.sessions()]
except StoreUnavailable as error:
    said = [error.code, str(error)]
print(json.dumps(said))
"""


def opened_by_nobody(store: Path) -> list[str | int]:
    """What an engine says that is started on a store by a user without rights."""
    user = NOBODY if os.geteuid() == 0 else 0
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(store), str(user)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: list[str | int] = json.loads(done.stdout)
    return said


@pytest.fixture
def reachable(tmp_path: Path) -> Iterator[None]:
    """Let others come as far as the store; pytest keeps them out."""
    folders = [tmp_path, *tmp_path.parents]
    mine = [path for path in folders if path.stat().st_uid == os.geteuid() and path != Path("/")]
    modes = {path: path.stat().st_mode & 0o7777 for path in mine}
    for path, mode in modes.items():
        path.chmod(mode | 0o011)
    yield
    for path, mode in modes.items():
        path.chmod(mode)


def test_a_store_of_another_user_is_refused(store: Path, log: list[int], reachable: None) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can start an engine as another user")
    code, words = opened_by_nobody(store)
    assert code == "store_unavailable"
    assert str(store) in str(words)
    assert "permissions" in str(words)
    with open_engine(engine_config(store, disk_bytes=2**22)) as engine:
        assert talk(engine, log) > 0


def test_a_store_that_nobody_may_look_for_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can start an engine as another user")
    code, words = opened_by_nobody(tmp_path / "hidden" / "store")
    assert code == "store_unavailable"
    assert str(tmp_path / "hidden") in str(words)


def test_a_store_that_may_be_read_only_is_refused(
    store: Path, log: list[int], reachable: None
) -> None:
    """Its own user's, or everybody's to read, but nobody's to write."""
    everything = [store, *store.rglob("*")]
    modes = {path: path.stat().st_mode & 0o7777 for path in everything}
    for path, mode in modes.items():
        path.chmod(0o555 if path.is_dir() else 0o444)
        assert mode in (0o700, 0o600)
    before = {path: path.read_bytes() for path in everything if path.is_file()}
    code, words = opened_by_nobody(store)
    assert code == "store_unavailable"
    assert str(store) in str(words)
    assert {path: path.read_bytes() for path in everything if path.is_file()} == before
    for path, mode in modes.items():
        path.chmod(mode)
    with open_engine(engine_config(store, disk_bytes=2**22)) as engine:
        assert talk(engine, log) > 0
