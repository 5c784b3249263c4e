"""A restore that takes its time holds no transaction, so the index reuses its pages."""

from __future__ import annotations

from pathlib import Path

from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory, disk_bytes
from sessionkv.types import MoveOutcome
from tests.builders.store import IDENTITY, ROOT, block, geometry, payload, query


def test_two_hundred_overwrites_while_a_receipt_is_held(tmp_path: Path) -> None:
    with StoreDirectory.open(tmp_path / "store") as directory:
        store = BlockStore(directory, IDENTITY, geometry(), cap_bytes=2**24)
        held, other = block(ROOT, [1] * 4), block(ROOT, [2] * 4)
        store.write(held, memoryview(payload(held)))
        receipt = store.lookup(query([1] * 4))

        def overwrite(times: int) -> int:
            for _ in range(times):
                store.delete([other.key])
                assert store.write(other, memoryview(payload(other))) is MoveOutcome.OK
            return disk_bytes(directory.blocks_path, "*/index/data.mdb")

        few = overwrite(10)
        assert overwrite(200) == few
        assert few <= 24 * 4096
        into = bytearray(4096)
        assert store.read(receipt.blocks[0], memoryview(into)) is MoveOutcome.OK
        assert into == payload(held)
        store.close()
