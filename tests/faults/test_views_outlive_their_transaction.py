"""What was read stays what was read, however often its place on disk is written anew."""

from __future__ import annotations

from pathlib import Path

from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.journal import Journal
from sessionkv.types import MoveOutcome, PutHead, PutNode
from tests.builders.store import IDENTITY, ROOT, block, geometry, head, node, payload, query


def test_a_block_read_before_its_slot_is_reused(tmp_path: Path) -> None:
    with StoreDirectory.open(tmp_path / "store") as directory:
        store = BlockStore(directory, IDENTITY, geometry(), cap_bytes=2**24)
        record = block(ROOT, [1] * 4)
        store.write(record, memoryview(payload(record)))
        receipt = store.lookup(query([1] * 4))
        into = bytearray(4096)
        assert store.read(receipt.blocks[0], memoryview(into)) is MoveOutcome.OK
        store.release(receipt.receipt_id)
        last = record
        for i in range(6):
            store.delete([last.key])
            last = block(ROOT, [10 + i] * 4)
            store.write(last, memoryview(payload(last)))
        assert store.lookup(query([15] * 4)).blocks[0].slot == receipt.blocks[0].slot
        assert into == payload(record)
        store.close()


def test_journal_values_are_copies(tmp_path: Path) -> None:
    with StoreDirectory.open(tmp_path / "store") as directory:
        journal = Journal(directory)
        journal.commit([[PutNode(node(1)), PutHead(head("a", 1, "x" * 3000))]])
        state = journal.load()
        for i in range(6):
            journal.commit([[PutHead(head("a", 1, "x" * 3000)), PutNode(node(2 + i, 1))]])
        assert state.heads == (head("a", 1, "x" * 3000),)
        assert state.nodes == (node(1),)
        journal.close()
