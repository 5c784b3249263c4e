"""Blocks to measure with: the sizes that models have, chains of records, bytes that differ."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sessionkv.types import BlockHash, BlockRecord, DiskQuery, KVGeometry

ROOT = BlockHash(bytes(32))
# 16 tokens of the default model in fp32, and of shapes with 0.6 and 8 billion weights in bf16.
GEOMETRIES = {
    720: KVGeometry(30, 3, 64, 16, "float32", 4),
    1792: KVGeometry(28, 8, 128, 16, "bfloat16", 2),
    2304: KVGeometry(36, 8, 128, 16, "bfloat16", 2),
}
_DISTINCT = 32


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks of one geometry with their bytes; many share theirs, which no contender can use."""

    geometry: KVGeometry
    records: tuple[BlockRecord, ...]
    payloads: tuple[memoryview, ...]

    @property
    def total_bytes(self) -> int:
        """Payload bytes of all records."""
        return len(self.records) * self.geometry.block_bytes

    def payload(self, number: int) -> memoryview:
        """Bytes of one record."""
        return self.payloads[number % len(self.payloads)]

    def query(self, start: int, stop: int) -> DiskQuery:
        """Asks for the records from ``start`` to ``stop``."""
        part = self.records[start:stop]
        tokens = tuple(token for record in part for token in record.token_ids)
        return DiskQuery(tuple(record.key for record in part), part[0].parent, tokens, 0)


def chain(count: int, root: BlockHash = ROOT) -> Iterator[BlockRecord]:
    """One history of full blocks."""
    parent = root
    for number in range(count):
        key = BlockHash(hashlib.sha256(parent + number.to_bytes(8, "little")).digest())
        yield BlockRecord(key, parent, tuple(range(number, number + 16)))
        parent = key


def load(size_kib: int, total_bytes: int, *, chain_blocks: int | None = None) -> Load:
    """About ``total_bytes``, in memory that is aligned to pages as a host arena is.

    One history, or as many as there are of ``chain_blocks``.
    """
    geometry = GEOMETRIES[size_kib]
    count = max(8, total_bytes // geometry.block_bytes)
    distinct = min(_DISTINCT, count)
    pool = arena(distinct, geometry.block_bytes)
    for view in pool:
        view[:] = os.urandom(geometry.block_bytes)
    size = chain_blocks or count
    records = [
        record
        for start in range(0, count, size)
        for record in chain(min(size, count - start), BlockHash(start.to_bytes(32, "big")))
    ]
    return Load(geometry, tuple(records), tuple(pool))


def arena(count: int, block_bytes: int) -> list[memoryview]:
    """Memory of so many blocks, with pages behind it."""
    view = memoryview(mmap.mmap(-1, count * block_bytes))
    for start in range(0, len(view), mmap.PAGESIZE):
        view[start] = 1
    return [view[i * block_bytes : (i + 1) * block_bytes] for i in range(count)]


def forget_pages(path: Path) -> None:
    """Drop the pages of all files below ``path`` from the page cache: the next read is cold."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
