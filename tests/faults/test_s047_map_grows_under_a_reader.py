"""The map grows only while no transaction is open; what was read before stays what it was."""

from __future__ import annotations

from pathlib import Path

import lmdb
import pytest

from sessionkv.store.directory import StoreDirectory
from sessionkv.store.environment import open_environment, write
from sessionkv.store.journal import Journal
from sessionkv.types import PutNode
from tests.builders.store import node


def test_what_was_loaded_outlives_the_growth(tmp_path: Path) -> None:
    with StoreDirectory.open(tmp_path / "store") as directory:
        journal = Journal(directory, map_bytes=64 * 1024)
        journal.commit([[PutNode(node(1, reply_blob=b"first" * 100))]])
        before = journal.load()
        for i in range(2, 30):
            journal.commit([[PutNode(node(i, 1, reply_blob=bytes([i]) * 30_000))]])
        assert before.nodes == (node(1, reply_blob=b"first" * 100),)
        after = journal.load()
        assert after.nodes[0] == before.nodes[0]
        assert [n.reply_blob for n in after.nodes[1:]] == [
            bytes([i]) * 30_000 for i in range(2, 30)
        ]
        journal.close()


def test_a_full_map_runs_the_work_again_with_no_transaction_open(tmp_path: Path) -> None:
    env, moved = open_environment(tmp_path / "env", max_dbs=1, map_bytes=32 * 1024)
    assert moved is None
    sizes: list[int] = []

    def work(txn: lmdb.Transaction) -> None:
        sizes.append(env.info()["map_size"])
        txn.put(b"k", b"v" * 200_000)

    write(env, work)
    assert sizes == [32 * 1024 * 2**i for i in range(len(sizes))]
    assert len(sizes) > 2

    def failing(txn: lmdb.Transaction) -> None:
        txn.put(b"k", b"other")
        raise KeyError("stop")

    with pytest.raises(KeyError):
        write(env, failing)
    with env.begin() as txn:
        assert txn.get(b"k") == b"v" * 200_000
    env.close()
