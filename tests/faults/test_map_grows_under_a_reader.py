"""The map grows only while no transaction is open; what was read before stays what it was."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import lmdb
import pytest

from sessionkv.store import block_index
from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.environment import open_environment, write
from sessionkv.store.journal import Journal
from sessionkv.types import MoveOutcome, PutNode
from tests.builders.doors import Later
from tests.builders.store import IDENTITY, ROOT, Gates, block, geometry, node, payload, query


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


def test_a_restore_in_the_middle_reads_what_was_there_before_the_growth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = partial(open_environment, map_bytes=96 * 1024)
    monkeypatch.setattr(block_index, "open_environment", small)
    gates = Gates("before_read")
    with StoreDirectory.open(tmp_path / "store") as directory:
        store = BlockStore(directory, IDENTITY, geometry(), cap_bytes=2**24, gates=gates)
        env = store._index._env
        first = block(ROOT, [1] * 4)
        store.write(first, memoryview(payload(first)))
        receipt = store.lookup(query([1] * 4))
        into = bytearray(4096)
        job = store.begin_read(receipt.blocks, [memoryview(into)])
        restore = Later(job.run)
        assert gates.reached["before_read"].wait(30)
        before = env.info()["map_size"]
        others = [block(ROOT, [i] * 4) for i in range(2, 600)]
        for start in range(0, len(others), 100):
            batch = [(r, memoryview(payload(r))) for r in others[start : start + 100]]
            assert set(store.write_many(batch)) == {MoveOutcome.OK}
        assert env.info()["map_size"] > before
        gates.open("before_read")
        restore.result()
        assert store.finish_read(job) == [MoveOutcome.OK]
        assert into == payload(first)
        assert store.verify() == (599, 0)
        store.close()


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
