"""A restore that takes its time holds no transaction, so the index reuses its pages."""

from __future__ import annotations

from pathlib import Path

from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory, disk_bytes
from sessionkv.types import MoveOutcome
from tests.builders.doors import Later
from tests.builders.store import IDENTITY, ROOT, Gates, block, geometry, payload, query


def test_two_hundred_overwrites_while_a_restore_stands_in_the_middle(tmp_path: Path) -> None:
    with StoreDirectory.open(tmp_path / "store") as directory:
        gates = Gates("before_read")
        store = BlockStore(directory, IDENTITY, geometry(), cap_bytes=2**24, gates=gates)
        held, other = block(ROOT, [1] * 4), block(ROOT, [2] * 4)
        store.write(held, memoryview(payload(held)))
        receipt = store.lookup(query([1] * 4))
        into = bytearray(4096)
        job = store.begin_read(receipt.blocks, [memoryview(into)])
        restore = Later(job.run)
        assert gates.reached["before_read"].wait(30)

        def overwrite(times: int) -> int:
            for _ in range(times):
                store.delete([other.key])
                assert store.write(other, memoryview(payload(other))) is MoveOutcome.OK
            return disk_bytes(directory.blocks_path, "*/index/data.mdb")

        few = overwrite(10)
        assert overwrite(200) == few
        assert few <= 24 * 4096
        gates.open("before_read")
        restore.result()
        assert store.finish_read(job) == [MoveOutcome.OK]
        assert into == payload(held)
        store.close()
