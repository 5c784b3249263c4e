"""Files that are shorter than their newest root says: sound where only free pages lack."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import lmdb
import lmdb.verify
import pytest

from sessionkv.store import environment
from sessionkv.store.environment import check_environment, open_environment, write
from sessionkv.store.lacking_pages import num_lacking
from sessionkv.store.lmdb_layout import Unsound

PAGE = 4096
UNTOUCHED = 3


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An environment whose last pages were taken and given back by one transaction."""
    env, _ = open_environment(tmp_path / "env", max_dbs=1)
    db = env.open_db(b"db")
    for number in range(4):
        write(env, lambda txn, key=b"%d" % number: txn.put(key, b"v" * 100, db=db))

    def take_and_give_back(txn: lmdb.Transaction) -> None:
        txn.put(b"more", b"v", db=db)
        txn.put(b"long", bytes(UNTOUCHED * PAGE - 100), db=db)
        txn.delete(b"long", db=db)

    write(env, take_and_give_back)
    pages = env.info()["last_pgno"] + 1
    env.close()
    data = tmp_path / "env" / "data.mdb"
    assert data.stat().st_size == (pages - UNTOUCHED) * PAGE
    return tmp_path / "env"


@pytest.mark.parametrize("limit", [environment.VERIFY_LIMIT_BYTES, 0])
def test_a_file_that_lacks_free_pages_is_sound(
    path: Path, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "VERIFY_LIMIT_BYTES", limit)
    assert num_lacking(path / "data.mdb") == 0
    assert check_environment(path, whole=True) is None
    env, moved = open_environment(path, max_dbs=1)
    assert moved is None
    db = env.open_db(b"db")
    write(env, lambda txn: txn.put(b"long", b"w" * 9 * PAGE, db=db))  # on the pages that lack
    with env.begin() as txn:
        assert txn.get(b"3", db=db) == b"v" * 100
        assert txn.get(b"long", db=db) == b"w" * 9 * PAGE
    env.close()
    assert check_environment(path, whole=True) is None


@pytest.mark.parametrize("limit", [environment.VERIFY_LIMIT_BYTES, 0])
def test_a_file_that_lacks_a_page_in_use_is_moved_aside(
    path: Path, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "VERIFY_LIMIT_BYTES", limit)
    data = path / "data.mdb"
    with data.open("r+b") as file:
        file.truncate(data.stat().st_size // 2)
    env, moved = open_environment(path, max_dbs=1)
    env.close()
    assert moved == path.with_name("env.damaged-1")


def test_any_cut_is_seen(path: Path) -> None:
    data = path / "data.mdb"
    whole = data.read_bytes()
    verdicts = set()
    for pages in range(2, len(whole) // PAGE):
        data.write_bytes(whole[: pages * PAGE + PAGE // 2])
        problems = lmdb.verify.verify(str(data))  # knows every page that is in use
        try:
            is_sound = num_lacking(data) == 0
        except Unsound:
            is_sound = False
        assert is_sound is not any(problems)
        verdicts.add(is_sound)
    assert verdicts == {True, False}
    for pages in (0, 1):
        data.write_bytes(whole[: pages * PAGE])
        with pytest.raises(Unsound):
            num_lacking(data)


def test_any_damage_is_survived(path: Path) -> None:
    data = path / "data.mdb"
    whole = data.read_bytes()
    rng = random.Random(3)
    for _ in range(300):
        harmed = bytearray(whole)
        for _ in range(20):
            harmed[rng.randrange(len(harmed))] = rng.randrange(256)
        data.write_bytes(harmed)
        with suppress(Unsound):
            assert num_lacking(data) >= 0
