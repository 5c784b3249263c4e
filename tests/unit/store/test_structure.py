"""The structural check against files as LMDB writes them, and against harm, beside LMDB's own."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import lmdb
import lmdb.verify
import pytest

from sessionkv.store.environment import open_environment, write
from sessionkv.store.structure import check_structure

PAGE = 4096


def problems_of(data: Path) -> list[str]:
    """What LMDB's own check finds, but for pages that nobody uses."""
    try:
        return [text for text in lmdb.verify.verify(str(data)) if "a leak" not in text]
    except lmdb.verify.VerifyError as error:
        return [str(error)]


class Churn:
    """Random changes to databases of the kinds that stores have."""

    def __init__(self, path: Path, seed: int) -> None:
        self.data = path / "data.mdb"
        self.env, _ = open_environment(path, max_dbs=3)
        self._plain = self.env.open_db(b"plain")
        self._lists = self.env.open_db(b"lists", dupsort=True, dupfixed=True)
        self._empty = self.env.open_db(b"empty")
        self._rng = random.Random(seed)
        self._keys: set[bytes] = set()

    def transaction(self, changes: int) -> None:
        write(self.env, lambda txn: [self._change(txn) for _ in range(changes)])

    def _change(self, txn: lmdb.Transaction) -> None:
        rng = self._rng
        key = rng.choice((b"a" * 30, b"", bytes(8))) + b"%d" % rng.randrange(400)
        dice = rng.random()
        if dice < 0.4:
            size = (0, 3, 60, 700, 3000, 9000)[sum(key) % 6]
            txn.put(key, bytes([size % 251]) * size, db=self._plain)
        elif dice < 0.6:
            txn.delete(key, db=self._plain)
        else:
            parent = b"parent%d" % int(rng.expovariate(0.4))
            value = rng.randrange(600).to_bytes(33, "big")
            if dice < 0.9:
                txn.put(parent, value, db=self._lists)
            else:
                txn.delete(parent, value, db=self._lists)


@pytest.mark.parametrize("seed", range(2))
def test_whatever_lmdb_writes_is_sound(tmp_path: Path, seed: int) -> None:
    churn = Churn(tmp_path / "env", seed)
    assert check_structure(churn.data) is None  # empty
    # While somebody reads, what is freed is not used again: many lists of free pages.
    reader = churn.env.begin() if seed % 2 else None
    try:
        for number in range(40):
            churn.transaction(1 + number % 7 * 20)
            assert check_structure(churn.data) is None
        for _ in range(200):
            churn.transaction(2)
        assert check_structure(churn.data) is None
        assert problems_of(churn.data) == []
    finally:
        if reader is not None:
            reader.abort()
        churn.env.close()


def test_it_is_as_strict_as_lmdb_itself(tmp_path: Path) -> None:
    churn = Churn(tmp_path / "env", 5)
    for _ in range(12):
        churn.transaction(40)
    churn.env.close()
    whole = churn.data.read_bytes()
    rng = random.Random(6)
    verdicts: Counter[tuple[bool, bool]] = Counter()
    for _ in range(100):
        harmed = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            _harm(rng, harmed, whole)
        churn.data.write_bytes(harmed)
        theirs, ours = problems_of(churn.data), check_structure(churn.data)
        assert ours or not theirs, theirs
        verdicts[bool(theirs), bool(ours)] += 1
    assert verdicts[True, True] > 10
    assert verdicts[False, False] > 10


def _harm(rng: random.Random, harmed: bytearray, whole: bytes) -> None:
    page = rng.randrange(len(harmed) // PAGE) * PAGE
    dice = rng.random()
    if dice < 0.6:
        harmed[page + rng.randrange(76)] ^= 1 << rng.randrange(8)  # headers
    elif dice < 0.9:
        harmed[page + rng.randrange(PAGE)] ^= 1 << rng.randrange(8)
    else:
        other = rng.randrange(len(whole) // PAGE) * PAGE
        harmed[page : page + PAGE] = whole[other : other + PAGE]


def test_nodes_that_share_bytes_are_found(tmp_path: Path) -> None:
    """LMDB's own check lets them pass; a later change to the page would harm a neighbour."""
    env, _ = open_environment(tmp_path / "env", max_dbs=1)
    db = env.open_db(b"db")
    write(env, lambda txn: [txn.put(b"%d" % i, b"v" * 60, db=db) for i in range(9)])
    env.close()
    data = tmp_path / "env" / "data.mdb"
    harmed = bytearray(data.read_bytes())
    node = harmed.rindex(b"5" + b"v" * 60) - 8
    assert harmed[node] == 60
    harmed[node] = 58
    data.write_bytes(harmed)
    assert problems_of(data) == []
    assert "overlap" in (check_structure(data) or "")


def test_a_long_value_that_became_shorter_keeps_its_pages(tmp_path: Path) -> None:
    """LMDB's own check takes that for damage."""
    env, _ = open_environment(tmp_path / "env", max_dbs=1)
    db = env.open_db(b"db")

    def shorten(txn: lmdb.Transaction) -> None:
        txn.put(b"key", bytes(9000), db=db)
        txn.put(b"key", bytes(2500), db=db)

    write(env, shorten)
    env.close()
    data = tmp_path / "env" / "data.mdb"
    assert check_structure(data) is None
    assert problems_of(data)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    data = tmp_path / "data.mdb"
    for content in (b"", b"x", bytes(PAGE), b"text" * 4000):
        data.write_bytes(content)
        assert check_structure(data)
