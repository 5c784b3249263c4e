"""Three ways to keep blocks on disk: the product's, values inside LMDB, and a file, to compare.

All read into the same memory. The product and the values check xxh3-128 when reading; the file
neither indexes nor checks: it is the limit. Numbers are those of records of a load.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import lmdb
import xxhash

from benchmarks.store.shapes import Load, arena
from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.journal import Journal
from sessionkv.store.worker import LookedUp, StoreAnswer, StoreWorker
from sessionkv.types import BlockMove, DiskBlock, MoveOutcome, Tier, Transfer, TransferResult

TRANSFER_BLOCKS = 64
_TRANSFERS = 3  # under way at once
_CHUNK_BYTES = 8 * 1024**2


class Contender(Protocol):
    """One way. Everything is durable when ``write`` or ``delete`` returns."""

    def write(self, numbers: Sequence[int]) -> None:
        """Store blocks that are not there."""
        ...

    def delete(self, numbers: Sequence[int]) -> None:
        """Forget blocks, those of a history from its end on."""
        ...

    def read(self) -> None:
        """Read all, in the order of the chain."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class RawFile:
    """One preallocated file: written in large pieces and synchronised once, read in order."""

    def __init__(self, path: Path, load: Load) -> None:
        self._load = load
        path.mkdir(exist_ok=True)
        self._fd = os.open(path / "raw", os.O_RDWR | os.O_CREAT)
        self._blocks = max(1, _CHUNK_BYTES // load.geometry.block_bytes)
        self._into = arena(_TRANSFERS * TRANSFER_BLOCKS, load.geometry.block_bytes)

    def write(self, numbers: Sequence[int]) -> None:
        size = self._load.geometry.block_bytes
        os.posix_fallocate(self._fd, 0, len(numbers) * size)
        for start in range(0, len(numbers), self._blocks):
            part = numbers[start : start + self._blocks]
            views = [self._load.payload(number) for number in part]
            _whole(os.pwritev(self._fd, views, start * size), len(part) * size)
        os.fsync(self._fd)

    def delete(self, numbers: Sequence[int]) -> None:
        """Nothing: writing again writes over."""

    def read(self) -> None:
        size, total = self._load.geometry.block_bytes, len(self._load.records)
        for start in range(0, total, self._blocks):
            place = start % (len(self._into) - self._blocks)
            views = self._into[place : place + min(self._blocks, total - start)]
            _whole(os.preadv(self._fd, views, start * size), len(views) * size)

    def close(self) -> None:
        os.close(self._fd)


class Values:
    """Payload as values of LMDB, checksum in front, so many in a transaction."""

    def __init__(self, path: Path, load: Load, *, sync: bool) -> None:
        path.mkdir(exist_ok=True)
        self._load = load
        self._env = lmdb.open(str(path / "lmdb"), map_size=2**34, sync=sync, metasync=sync)
        self._into = arena(_TRANSFERS * TRANSFER_BLOCKS, load.geometry.block_bytes)

    def write(self, numbers: Sequence[int]) -> None:
        for start in range(0, len(numbers), TRANSFER_BLOCKS):
            with self._env.begin(write=True) as txn:
                for number in numbers[start : start + TRANSFER_BLOCKS]:
                    payload = self._load.payload(number)
                    digest = xxhash.xxh3_128_digest(payload)
                    txn.put(self._load.records[number].key, b"".join((digest, payload)))
        self._env.sync(True)

    def delete(self, numbers: Sequence[int]) -> None:
        with self._env.begin(write=True) as txn:
            for number in numbers:
                txn.delete(self._load.records[number].key)

    def read(self) -> None:
        for number, record in enumerate(self._load.records):
            view = self._into[number % len(self._into)]
            # Copied out: a view must not outlive its transaction.
            with self._env.begin(buffers=True) as txn:
                value = memoryview(txn.get(record.key, b""))
                view[:] = value[16:]
                digest = bytes(value[:16])
            if xxhash.xxh3_128_digest(view) != digest:
                raise RuntimeError(f"block {number} is wrong")

    def close(self) -> None:
        self._env.close()


class Segments:
    """The product: the store's threads with lookups and transfers, as an engine uses them."""

    def __init__(
        self,
        path: Path,
        load: Load,
        *,
        cap_bytes: int = 2**40,
        into: Sequence[memoryview] | None = None,
    ) -> None:
        self._load = load
        self._answers: SimpleQueue[StoreAnswer] = SimpleQueue()
        self._directory = StoreDirectory.open(path)
        blocks = BlockStore(self._directory, bytes(32), load.geometry, cap_bytes=cap_bytes)
        self._worker = StoreWorker(Journal(self._directory), blocks, self._answers)
        self._into = into or arena(_TRANSFERS * TRANSFER_BLOCKS, load.geometry.block_bytes)
        self._numbers = count()

    def write(self, numbers: Sequence[int]) -> None:
        load, sent, last = self._load, 0, 0
        for start in range(0, len(numbers), TRANSFER_BLOCKS):
            part = numbers[start : start + TRANSFER_BLOCKS]
            moves = tuple(BlockMove(load.records[number], number, -1) for number in part)
            views = [load.payload(number) for number in part]
            last = next(self._numbers)
            self._worker.transfer(Transfer(last, Tier.HOST, Tier.DISK, moves), views)
            sent += 1
        for _ in range(sent):
            self._result()

    def delete(self, numbers: Sequence[int]) -> None:
        self._worker.delete([self._load.records[number].key for number in numbers])

    def read(self) -> None:
        """As many restores as the memory has room for at once, one after the other."""
        total, size = len(self._load.records), TRANSFER_BLOCKS
        under_way: deque[int] = deque()
        for number, start in enumerate(range(0, total, size)):
            if len(under_way) == _TRANSFERS:
                self._worker.release(under_way.popleft())
            blocks, receipt_id = self.find(start, min(start + size, total))
            place = (number % _TRANSFERS) * size
            self.fetch(blocks, self._into[place : place + len(blocks)])
            under_way.append(receipt_id)
            if len(under_way) == _TRANSFERS:
                self._result()
        for _ in range(min(len(under_way), _TRANSFERS - 1)):
            self._result()
        for receipt_id in under_way:
            self._worker.release(receipt_id)

    def find(self, start: int, stop: int) -> tuple[tuple[DiskBlock, ...], int]:
        """The records on disk, which must be all, and the receipt that leases them."""
        self._worker.lookup(0, self._load.query(start, stop))
        held = []
        while not isinstance(answer := self._answers.get(), LookedUp):
            held.append(answer)
        for item in held:
            self._answers.put(item)
        if answer.receipt is None or len(answer.receipt.blocks) != stop - start:
            raise RuntimeError(f"blocks {start} to {stop} were not all found")
        return answer.receipt.blocks, answer.receipt.receipt_id

    def fetch(self, blocks: Sequence[DiskBlock], views: Sequence[memoryview]) -> None:
        """Ask for a transfer; :meth:`restore` waits for one."""
        moves = tuple(BlockMove(b.record, b.slot, i) for i, b in enumerate(blocks))
        transfer = Transfer(next(self._numbers), Tier.DISK, Tier.HOST, moves)
        self._worker.transfer(transfer, views)

    def restore(self, number: int, views: Sequence[memoryview]) -> tuple[DiskBlock, ...]:
        """One turn's history: one lookup and one transfer of the first ``number`` blocks."""
        blocks, receipt_id = self.find(0, number)
        self.fetch(blocks, views)
        self._result()
        self._worker.release(receipt_id)
        return blocks

    def close(self) -> None:
        self._worker.close(60)
        self._directory.close()

    def _result(self) -> None:
        while not isinstance(answer := self._answers.get(), TransferResult):
            pass  # evicted blocks are told, too
        if set(answer.outcomes) != {MoveOutcome.OK}:
            raise RuntimeError(f"not all is well: {set(answer.outcomes)}")


def _whole(done: int, wanted: int) -> None:
    if done != wanted:
        raise RuntimeError(f"{done} bytes of {wanted}")
