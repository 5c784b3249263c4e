"""What a large index costs to open and to keep open; nothing but the index is made.

python -m benchmarks.store.index FOLDER    (in a process of its own: opens, prints JSON)
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import lmdb

from benchmarks.report import Row, median_row
from benchmarks.store.options import StoreOptions
from benchmarks.store.shapes import GEOMETRIES, chain, forget_pages
from sessionkv.store.block_index import BlockIndex, open_index
from sessionkv.store.block_store import BlockStore, layout_of
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.index_entry import Entry
from sessionkv.types import BlockHash, BlockRecord, DiskQuery, KVGeometry, pack_tokens

ABOUT = "opening an index of many blocks, cold, and asking it; memory is of the process's own"
CHAIN_BLOCKS = 256
_LOOKUPS = 200
_BATCH = 20_000
IDENTITY = bytes(32)
GEOMETRY = GEOMETRIES[720]


def root(number: int) -> BlockHash:
    """What a history starts from."""
    return BlockHash(hashlib.sha256(number.to_bytes(8, "little")).digest())


def records(count: int) -> Iterator[BlockRecord]:
    """Histories of :data:`CHAIN_BLOCKS` blocks each, up to ``count`` blocks."""
    for number in range(-(-count // CHAIN_BLOCKS)):
        yield from chain(min(CHAIN_BLOCKS, count - number * CHAIN_BLOCKS), root(number))


def build(path: Path, count: int, geometry: KVGeometry = GEOMETRY) -> None:
    """A store whose index names ``count`` blocks, in few large transactions, without payload."""
    with StoreDirectory.open(path) as directory:
        folder = directory.blocks_path / IDENTITY.hex()
        index = open_index(folder, layout_of(geometry), cap_bytes=2**50)
        numbered = enumerate(records(count))
        while batch := list(islice(numbered, _BATCH)):

            def put(
                txn: lmdb.Transaction,
                index: BlockIndex = index,
                batch: list[tuple[int, BlockRecord]] = batch,
            ) -> None:
                for slot, record in batch:
                    tokens = pack_tokens(record.token_ids)
                    index.put(txn, Entry(record.key, record.parent, tokens, slot))

            index.write(put)
        index.close()


def measure(options: StoreOptions) -> list[Row]:
    """Build once; open in new processes, with the file's pages forgotten before each."""
    count = options.index_blocks
    found = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        path = Path(name) / "store"
        start_s = time.perf_counter()
        build(path, count)
        built_s = time.perf_counter() - start_s
        index = path / "blocks" / IDENTITY.hex() / "index" / "data.mdb"
        on_disk = index.stat().st_blocks * 512 / count
        for _ in range(options.repeats):
            forget_pages(path)
            command = [sys.executable, "-m", "benchmarks.store.index", str(path), str(count)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append(json.loads(done.stdout))

    def row(what: str, key: str, unit: str, bound: tuple[str, float] | None = None) -> Row:
        return median_row(
            f"{count:,} blocks: {what}", [one[key] for one in found], unit, bound=bound
        )

    return [
        row("open", "open_ms", "ms", ("<=", 1000.0)),
        row("memory after open", "open_bytes", "B a block", ("<=", 16.0)),
        row("memory after use", "used_bytes", "B a block", ("<=", 16.0)),
        row("pages of the index in memory, the system's to take", "mapped_bytes", "B a block"),
        row(f"a lookup of {CHAIN_BLOCKS} blocks, cold", "lookup_ms", "ms"),
        row("figures of the store", "stats_ms", "ms"),
        Row(f"{count:,} blocks: index on disk", on_disk, "B a block"),
        Row(f"{count:,} blocks: building it", built_s, "s"),
    ]


def opened(path: Path, count: int) -> dict[str, float]:
    """Open, ask, write nothing; what it cost. To be run in a new process."""
    before = _memory("RssAnon")
    start_s = time.perf_counter()
    directory = StoreDirectory.open(path)
    store = BlockStore(directory, IDENTITY, GEOMETRY, cap_bytes=2**50)
    open_s = time.perf_counter() - start_s
    after_open = _memory("RssAnon")
    chains = count // CHAIN_BLOCKS
    start_s = time.perf_counter()
    for number in range(0, chains, max(1, chains // _LOOKUPS)):
        part = tuple(chain(CHAIN_BLOCKS, root(number)))
        tokens = tuple(token for record in part for token in record.token_ids)
        query = DiskQuery(tuple(record.key for record in part), root(number), tokens, 0)
        receipt = store.lookup(query)
        if len(receipt.blocks) != CHAIN_BLOCKS:
            raise RuntimeError(f"{len(receipt.blocks)} blocks of {CHAIN_BLOCKS}")
        store.release(receipt.receipt_id)
    lookup_s = (time.perf_counter() - start_s) / min(chains, _LOOKUPS)
    start_s = time.perf_counter()
    if store.stats().blocks != count:
        raise RuntimeError("blocks are missing")
    stats_s = time.perf_counter() - start_s
    used = _memory("RssAnon")
    figures = {
        "open_ms": 1e3 * open_s,
        "open_bytes": (after_open - before) / count,
        "used_bytes": (used - before) / count,
        "mapped_bytes": _memory("RssFile") / count,
        "lookup_ms": 1e3 * lookup_s,
        "stats_ms": 1e3 * stats_s,
    }
    store.close()
    directory.close()
    return figures


def _memory(kind: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"this system does not tell {kind}")


if __name__ == "__main__":
    print(json.dumps(opened(Path(sys.argv[1]), int(sys.argv[2]))))
