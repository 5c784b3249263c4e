"""Readers that were killed leave their slots taken; they are taken back when none is left."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.journal import Journal
from sessionkv.store.worker import LookedUp, StoreAnswer, StoreWorker
from sessionkv.types import PutNode
from tests.builders.store import IDENTITY, geometry, node, query

READER = """
import lmdb, sys
txn = lmdb.open(sys.argv[1], max_readers=4, max_dbs=4).begin()
print("reading", flush=True)
sys.stdin.read()
"""


def test_slots_of_killed_readers_are_freed(tmp_path: Path) -> None:
    with StoreDirectory.open(tmp_path / "store") as directory:
        journal = Journal(directory, max_readers=4)
        journal.commit([[PutNode(node(1))]])
        readers = [
            subprocess.Popen(
                [sys.executable, "-c", READER, str(directory.journal_path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for _ in range(4)
        ]
        for reader in readers:
            with reader:
                assert reader.stdout is not None
                assert reader.stdout.readline() == b"reading\n"
                reader.kill()
        assert [n.node_id for n in journal.load().nodes] == [1]
        journal.commit([[PutNode(node(2, 1))]])
        assert [n.node_id for n in journal.load().nodes] == [1, 2]
        journal.close()


def test_any_number_of_threads_may_ask(tmp_path: Path) -> None:
    with StoreDirectory.open(tmp_path / "store") as directory:
        answers: SimpleQueue[StoreAnswer] = SimpleQueue()
        blocks = BlockStore(directory, IDENTITY, geometry(), cap_bytes=2**24)
        worker = StoreWorker(Journal(directory), blocks, answers)
        threads = [
            threading.Thread(target=worker.lookup, args=(i, query([i] * 4))) for i in range(130)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = [answers.get(timeout=30) for _ in range(130)]
        assert sorted(a.ticket for a in found if isinstance(a, LookedUp)) == list(range(130))
        assert all(isinstance(a, LookedUp) and a.receipt for a in found)
        worker.close(5)
