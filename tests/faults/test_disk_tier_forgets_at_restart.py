"""What a killed process wrote is found, counted and bounded by the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory, disk_bytes
from sessionkv.types import MoveOutcome
from tests.builders.store import IDENTITY, ROOT, block, geometry, payload, query

BLOCK = 2**20
CAP = 20 * (BLOCK + 4096) + BLOCK // 2
CHILD = """
import os, signal, sys
from pathlib import Path
from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from tests.builders.store import IDENTITY, ROOT, block, geometry, payload
directory = StoreDirectory.open(sys.argv[1])
store = BlockStore(directory, IDENTITY, geometry(2**20), cap_bytes=int(sys.argv[2]))
for i in range(20):
    record = block(ROOT, [i] * 4)
    store.write(record, memoryview(payload(record, 2**20)))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_twenty_entries_survive_sigkill_and_stay_under_the_cap(
    tmp_path: Path, hash_seed: str
) -> None:
    path = tmp_path / "store"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(CAP)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)},
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL
    with StoreDirectory.open(path) as directory:
        store = BlockStore(directory, IDENTITY, geometry(BLOCK), cap_bytes=CAP)
        assert store.stats().blocks == 20
        assert store.verify() == (20, 0)
        for i in range(20, 25):
            record = block(ROOT, [i] * 4)
            assert store.write(record, memoryview(payload(record, BLOCK))) is MoveOutcome.OK
        assert store.evicted() == tuple(block(ROOT, [i] * 4).key for i in range(5))
        found = store.lookup(query([5] * 4))
        assert [b.record for b in found.blocks] == [block(ROOT, [5] * 4)]
        stats = store.stats()
        assert stats.blocks == 20
        assert stats.used_bytes == disk_bytes(directory.blocks_path) <= CAP
        # No bytes that nothing reaches: slots and an index, no more.
        assert stats.used_bytes - disk_bytes(directory.blocks_path, "*/index/*") == pytest.approx(
            20 * (BLOCK + 4096), abs=16_384
        )
        store.close()
