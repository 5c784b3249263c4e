"""Records of two sizes share a directory and a cap for long: both keep working to the end."""

from __future__ import annotations

import random
from pathlib import Path

from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory, disk_bytes
from sessionkv.types import MoveOutcome
from tests.builders.store import ROOT, block, geometry, payload, query


def test_two_models_in_turn_under_one_cap(tmp_path: Path) -> None:
    rng = random.Random(7)
    cap = 2**21
    number = 0
    with StoreDirectory.open(tmp_path / "store") as directory:
        for round_number in range(10):
            size = (16_384, 65_536)[round_number % 2]
            identity = bytes([round_number % 2]) * 32
            store = BlockStore(directory, identity, geometry(size), cap_bytes=cap)
            for _ in range(50):
                record = block(ROOT, [number] * 4)
                number += 1
                view = memoryview(payload(record, size))
                assert store.write(record, view) is MoveOutcome.OK
                if rng.random() < 0.4:
                    store.delete([block(ROOT, [number - rng.randint(2, 9)] * 4).key])
                assert disk_bytes(directory.blocks_path) <= cap + size + 4096
            # The newest are there, whatever happened before.
            receipt = store.lookup(query([number - 1] * 4))
            assert len(receipt.blocks) == 1
            sound, bad = store.verify()
            assert (bad, sound >= 10) == (0, True)
            store.close()
