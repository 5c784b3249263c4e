"""Where a block's payload is best kept: in segment files, or as a value inside LMDB.

Writes, then reads warm and cold, records of the size of a 16-token block of the default model in
fp32 (720 KiB). Both ways are durable when a batch is answered, hold the same metadata and check
xxh3-128 when reading; segment files are the product's own block store.

    python -m benchmarks.store.layout [--records 128] [--batch 11] [--rounds 3] [--dir DIR]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import lmdb
import xxhash

from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from sessionkv.types import BlockHash, BlockRecord, DiskBlock, DiskQuery, KVGeometry, MoveOutcome

GEOMETRY = KVGeometry(30, 3, 64, 16, "float32", 4)
ROOT = BlockHash(bytes(32))


def chain(count: int) -> list[BlockRecord]:
    """A chain of full blocks."""
    records: list[BlockRecord] = []
    for i in range(count):
        parent = records[-1].key if records else ROOT
        key = BlockHash(hashlib.sha256(parent + bytes([i % 256])).digest())
        records.append(BlockRecord(key, parent, tuple(range(i, i + 16))))
    return records


class Values:
    """Payload as values of LMDB, checksum in front."""

    def __init__(self, path: Path) -> None:
        """Open an empty environment."""
        self.env = lmdb.open(str(path / "lmdb"), map_size=2**33)
        self.into = bytearray(GEOMETRY.block_bytes)

    def write(self, batch: list[tuple[BlockRecord, memoryview]]) -> None:
        """One synchronous transaction."""
        with self.env.begin(write=True) as txn:
            for record, payload in batch:
                digest = xxhash.xxh3_128_digest(payload)
                txn.put(record.key, b"".join((digest, payload)))

    def read(self, records: list[BlockRecord]) -> None:
        """Each value copied out of its transaction and checked."""
        for record in records:
            with self.env.begin(buffers=True) as txn:
                value = txn.get(record.key)
                self.into[:] = value[16:]
                digest = bytes(value[:16])
            if xxhash.xxh3_128_digest(self.into) != digest:
                raise SystemExit("wrong bytes")

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


class Segments:
    """The product's block store."""

    def __init__(self, path: Path) -> None:
        """Open an empty store."""
        self.directory = StoreDirectory.open(path / "store")
        self.store = BlockStore(self.directory, bytes(32), GEOMETRY, cap_bytes=2**40)
        self.into = bytearray(GEOMETRY.block_bytes)

    def write(self, batch: list[tuple[BlockRecord, memoryview]]) -> None:
        """One batch: payload, fdatasync, index transaction."""
        if set(self.store.write_many(batch)) != {MoveOutcome.OK}:
            raise SystemExit("not written")

    def read(self, records: list[BlockRecord]) -> None:
        """One lookup, then each block read into place and checked."""
        tokens = tuple(t for record in records for t in record.token_ids)
        keys = tuple(record.key for record in records)
        receipt = self.store.lookup(DiskQuery(keys, ROOT, tokens, 0))
        if len(receipt.blocks) != len(records):
            raise SystemExit("not found")
        for found in receipt.blocks:
            if self.store.read(DiskBlock(found.record, found.slot), memoryview(self.into)) is not (
                MoveOutcome.OK
            ):
                raise SystemExit("wrong bytes")
        self.store.release(receipt.receipt_id)

    def close(self) -> None:
        """Close the store."""
        self.store.close()
        self.directory.close()


def forget_pages(path: Path) -> None:
    """Drop the files' pages from the page cache, so that the next read is cold."""
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def timed(work: Callable[[], None]) -> float:
    """Seconds that ``work`` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def one_round(kind: type[Values] | type[Segments], options: argparse.Namespace) -> list[float]:
    """MB/s of writing, reading warm and reading cold."""
    records = chain(options.records)
    payload = memoryview(bytearray(os.urandom(GEOMETRY.block_bytes)))
    size = options.records * GEOMETRY.block_bytes / 1e6
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        path = Path(name)
        side = kind(path)

        def write() -> None:
            for start in range(0, len(records), options.batch):
                side.write([(r, payload) for r in records[start : start + options.batch]])

        speeds = [size / timed(write), size / timed(lambda: side.read(records))]
        side.close()
        forget_pages(path)
        side = kind(path)
        speeds.append(size / timed(lambda: side.read(records)))
        side.close()
    return speeds


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=128)
    parser.add_argument("--batch", type=int, default=11)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=None)
    options = parser.parse_args()
    print(f"{'MB/s, medians':24}{'write':>8}{'warm':>8}{'cold':>8}")
    for kind in (Values, Segments):
        rounds = [one_round(kind, options) for _ in range(options.rounds)]
        medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
        print(f"{kind.__name__:24}" + "".join(f"{value:8.0f}" for value in medians))


if __name__ == "__main__":
    main()
