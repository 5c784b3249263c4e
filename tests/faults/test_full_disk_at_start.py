"""A disk without room at the start is an error in words, never a signal; KV is not needed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from sessionkv import SamplingParams
from sessionkv.errors import StoreUnavailable
from sessionkv.store.block_index import BlockIndex
from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.environment import open_environment
from sessionkv.store.journal import Journal
from tests.builders.engine import engine_config, open_engine
from tests.builders.store import IDENTITY, geometry

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.mark.parametrize("max_readers", [4, 126])
def test_the_mapped_lock_file_has_its_disk_space(tmp_path: Path, max_readers: int) -> None:
    """LMDB makes it sparse, and a store to a page that finds no room kills the process."""
    plain = lmdb.open(str(tmp_path / "plain"), max_readers=max_readers)
    env, _ = open_environment(tmp_path / "env", max_dbs=1, max_readers=max_readers)
    assert env.info()["max_readers"] == plain.info()["max_readers"] == max_readers
    lock = tmp_path / "env" / "lock.mdb"
    assert lock.stat().st_size == (tmp_path / "plain" / "lock.mdb").stat().st_size
    assert allocated(lock) >= lock.stat().st_size
    env.close()
    plain.close()


def test_no_room_for_the_lock_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sessionkv.store.environment.os.posix_fallocate", full)
    with (
        StoreDirectory.open(tmp_path / "store") as directory,
        pytest.raises(StoreUnavailable, match="No space left"),
    ):
        Journal(directory)


OPEN_WITH_LITTLE_ROOM = """
import resource, signal, sys
from sessionkv.errors import StoreUnavailable
from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.journal import Journal
from tests.builders.store import IDENTITY, geometry
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
room = int(sys.argv[2])
with StoreDirectory.open(sys.argv[1]) as directory:
    journal = None
    if sys.argv[3] == "blocks":
        journal = Journal(directory)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    try:
        if journal is None:
            Journal(directory)
        else:
            BlockStore(directory, IDENTITY, geometry(), cap_bytes=2**24)
    except StoreUnavailable as error:
        print("unavailable")
    else:
        print("opened")
"""


@pytest.mark.parametrize("what", ["journal", "blocks"])
def test_whatever_room_there_is_it_opens_or_says_so(tmp_path: Path, what: str) -> None:
    """Files may not grow past so many bytes, which stands for a disk of that size."""
    words = []
    for number, room in enumerate((0, 4096, 8192, 12288, 16384, 24576, 32768, 2**20)):
        child = subprocess.run(
            [sys.executable, "-c", OPEN_WITH_LITTLE_ROOM, tmp_path / str(number), str(room), what],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert child.returncode == 0, child.stderr
        words.append(child.stdout.strip())
    assert words == sorted(words, reverse=True)
    assert (words[0], words[-1]) == ("unavailable", "opened")


def test_a_block_store_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise lmdb.DiskError("mdb_txn_commit: No space left on device")

    monkeypatch.setattr(BlockIndex, "set_layout", full)
    with (
        StoreDirectory.open(tmp_path / "store") as directory,
        pytest.raises(StoreUnavailable, match="No space left"),
    ):
        BlockStore(directory, IDENTITY, geometry(), cap_bytes=2**24)


def test_conversations_go_on_without_their_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another block size wants a folder of its own, for which there is no room."""
    config = engine_config(tmp_path / "store", disk_bytes=2**22, block_size=4)
    with open_engine(config) as engine:
        engine.open("a").turn("hello", sampling=GREEDY)
    with open_engine(engine_config()) as engine:
        session = engine.open("a")
        session.turn("hello", sampling=GREEDY)
        expected = session.turn("again", sampling=GREEDY).tokens

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sessionkv.store.block_store.open_index", full)
    config = engine_config(tmp_path / "store", disk_bytes=2**22, block_size=8)
    with open_engine(config) as engine:
        assert engine.session("a").turn("again", sampling=GREEDY).tokens == expected
        assert engine.stats()["store"]["blocks"] is None


def test_a_journal_that_was_removed_takes_no_more(tmp_path: Path) -> None:
    """A turn in a file without a name would be acknowledged and gone at the next start."""
    with StoreDirectory.open(tmp_path / "store") as directory:
        journal = Journal(directory)
        journal.commit([[]])
        folder = directory.journal_path
        folder.rename(tmp_path / "elsewhere")
        with pytest.raises(StoreUnavailable, match="is gone"):
            journal.commit([[]])
        folder.mkdir()
        (folder / "data.mdb").touch()
        with pytest.raises(StoreUnavailable, match="replaced"):
            journal.commit([[]])
        (folder / "data.mdb").unlink()
        folder.rmdir()
        (tmp_path / "elsewhere").rename(folder)
        journal.commit([[]])
        journal.close()
