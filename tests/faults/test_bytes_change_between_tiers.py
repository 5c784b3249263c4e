"""A block's bytes are the same after any hop, and are taken only under the layout they had."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from sessionkv.types import DiskBlock, MoveOutcome
from tests.builders.store import IDENTITY, ROOT, block, geometry

# bfloat16: 436.0, 1e-30 nearly, -0.0, inf, -inf, two NaNs, a denormal.
ODD = struct.pack("<8H", 0x43DA, 0x0DA2, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0001) * 256


def test_odd_values_are_bit_exact_on_disk_and_another_dtype_is_a_miss(tmp_path: Path) -> None:
    with StoreDirectory.open(tmp_path / "store") as directory:
        shape = replace(geometry(), dtype="bfloat16")
        store = BlockStore(directory, IDENTITY, shape, cap_bytes=2**24)
        record = block(ROOT, [1, 2, 3, 4])
        assert store.write(record, memoryview(bytearray(ODD))) is MoveOutcome.OK
        into = bytearray(4096)
        assert store.read(DiskBlock(record, 0), memoryview(into)) is MoveOutcome.OK
        assert into == ODD
        store.close()
        # The same identity with another meaning of the bytes cannot be; were it, it is a miss.
        for other in (replace(shape, dtype="float16"), replace(shape, num_layers=2, head_dim=256)):
            store = BlockStore(directory, IDENTITY, other, cap_bytes=2**24)
            store.write(record, memoryview(bytearray(ODD)))  # known already: nothing is written
            outcome = store.read(DiskBlock(record, 0), memoryview(into))
            assert outcome is MoveOutcome.CORRUPT
            assert store.stats().blocks == 0
            store.close()
            store = BlockStore(directory, IDENTITY, shape, cap_bytes=2**24)
            store.write(record, memoryview(bytearray(ODD)))
            store.close()
