"""An entry that is being written is not there yet: for a question meanwhile, and after a crash."""

from __future__ import annotations

import shutil
from pathlib import Path
from queue import SimpleQueue

from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.journal import Journal
from sessionkv.store.worker import LookedUp, StoreAnswer, StoreWorker
from sessionkv.types import BlockMove, MoveOutcome, Tier, Transfer, TransferResult
from tests.builders.store import IDENTITY, ROOT, Gates, block, geometry, payload, query


def test_a_block_is_visible_only_after_its_commit(tmp_path: Path) -> None:
    directory = StoreDirectory.open(tmp_path / "store")
    gates = Gates("disk_put_half")
    answers: SimpleQueue[StoreAnswer] = SimpleQueue()
    blocks = BlockStore(directory, IDENTITY, geometry(), cap_bytes=2**24, gates=gates)
    worker = StoreWorker(Journal(directory), blocks, answers)
    record = block(ROOT, [1, 2, 3, 4])
    moves = (BlockMove(record, 0, -1),)
    worker.transfer(Transfer(1, Tier.HOST, Tier.DISK, moves), [memoryview(payload(record))])
    assert gates.reached["disk_put_half"].wait(30)
    worker.lookup(2, query([1, 2, 3, 4]))
    meanwhile = answers.get(timeout=30)
    assert isinstance(meanwhile, LookedUp)
    assert meanwhile.receipt is not None
    assert (meanwhile.receipt.blocks, meanwhile.receipt.tail) == ((), None)

    shutil.copytree(directory.path, tmp_path / "crashed")
    with StoreDirectory.open(tmp_path / "crashed") as other:
        crashed = BlockStore(other, IDENTITY, geometry(), cap_bytes=2**24)
        receipt = crashed.lookup(query([1, 2, 3, 4]))
        assert (receipt.blocks, receipt.tail) == ((), None)
        crashed.close()

    gates.open("disk_put_half")
    written = answers.get(timeout=30)
    assert isinstance(written, TransferResult)
    assert written.outcomes == (MoveOutcome.OK,)
    worker.lookup(3, query([1, 2, 3, 4]))
    looked_up = answers.get(timeout=30)
    assert isinstance(looked_up, LookedUp)
    assert looked_up.receipt is not None
    assert [found.record for found in looked_up.receipt.blocks] == [record]
    worker.close(5)
    directory.close()
