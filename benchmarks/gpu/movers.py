"""Whole blocks between a CUDA device, pinned host memory and the disk, through the real mover.

Moves between device and host are set against plain copies of pinned memory in the same run. Blocks
have the size of an 8B model's and lie scattered at both ends. Run with
``python -m benchmarks.gpu.movers``; takes about half a minute.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from benchmarks.report import Options, Row, as_table, median_row, ratio_row, timed
from benchmarks.store.shapes import GEOMETRIES, Load, chain, forget_pages
from sessionkv.cache.fetching import MOVES_PER_FETCH
from sessionkv.cache.spilling import MOVES_PER_TRANSFER
from sessionkv.engine.device_memory import reserve
from sessionkv.engine.gpu.copier import GpuCopier
from sessionkv.engine.movers import HostArena, Mover
from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.journal import Journal
from sessionkv.store.worker import LookedUp, StoreWorker
from sessionkv.types import BlockMove, MoveOutcome, Tier, Transfer, TransferResult

ABOUT = "blocks between device, host and disk in GB/s, against plain pinned copies"
GEOMETRY = GEOMETRIES[2304]


@dataclass(frozen=True)
class Sizes:
    """How much is moved."""

    blocks: int = 1024
    disk_blocks: int = 448
    plain_bytes: int = 2**30
    pin_bytes: int = 16 * 2**30


class Bench:
    """A pool twice as large as what is moved, a host tier and a disk."""

    def __init__(self, folder: Path, sizes: Sizes, device: str) -> None:
        self.sizes = sizes
        self.folder = folder
        self.directory = StoreDirectory.open(folder / "store")
        cap = 4 * (sizes.disk_blocks + 64) * GEOMETRY.block_bytes
        blocks = BlockStore(self.directory, bytes(32), GEOMETRY, cap_bytes=cap)
        self.answers: SimpleQueue[object] = SimpleQueue()
        self.store = StoreWorker(Journal(self.directory), blocks, self.answers)
        pool = torch.zeros(
            (2 * sizes.blocks, GEOMETRY.block_bytes), dtype=torch.uint8, device=device
        )
        pool.random_()
        self.pool = pool
        self.copier = GpuCopier(pool)
        arena = HostArena(sizes.blocks, GEOMETRY.block_bytes)
        self.mover = Mover(self.copier, arena, self.store, self.answers)
        self.copier.wait_pinned()
        self.load = Load(GEOMETRY, tuple(chain(sizes.blocks)), ())
        order = random.Random(7)
        self.device_ids = order.sample(range(2 * sizes.blocks), sizes.blocks)
        self.host_ids = order.sample(range(sizes.blocks), sizes.blocks)
        self._number = 0

    def close(self) -> None:
        self.mover.close(10)
        self.store.close(10)
        self.directory.close()
        self.copier.close()

    def submit(self, src: Tier, dst: Tier, ends: Sequence[tuple[int, int]]) -> int:
        """Submit moves of the first records in transfers as the cache makes them; how many."""
        moves = [
            BlockMove(record, *pair)
            for record, pair in zip(self.load.records[: len(ends)], ends, strict=True)
        ]
        size = MOVES_PER_FETCH if dst is Tier.DEVICE else MOVES_PER_TRANSFER
        parts = [tuple(moves[start : start + size]) for start in range(0, len(moves), size)]
        for part in parts:
            self._number += 1
            self.mover.submit(Transfer(self._number, src, dst, part))
        return len(parts)

    def await_results(self, count: int) -> None:
        while count:
            answer = self.answers.get(timeout=60)
            if isinstance(answer, TransferResult):
                count -= 1
                if set(answer.outcomes) != {MoveOutcome.OK}:
                    raise RuntimeError(f"not all arrived: {answer.outcomes}")

    def slots(self) -> list[int]:
        """Where the disk has the records that were written."""
        self.store.lookup(0, self.load.query(0, self.sizes.disk_blocks))
        answer = self.answers.get(timeout=60)
        while not isinstance(answer, LookedUp):
            answer = self.answers.get(timeout=60)
        if answer.receipt is None or len(answer.receipt.blocks) < self.sizes.disk_blocks:
            raise RuntimeError("the disk does not have all blocks")
        self.store.release(answer.receipt.receipt_id)
        return [found.slot for found in answer.receipt.blocks]


def measure(
    options: Options, *, sizes: Sizes | None = None, device: str = "cuda", folder: str | None = None
) -> list[Row]:
    """Copies first, then the disk, then pinning."""
    sizes = sizes or Sizes()
    rows = _plain(options, sizes, device)
    with _bench(sizes, device, folder) as bench:
        rows += _host(options, bench, rows)
        rows += _disk(options, bench)
    rows.append(_pinning(sizes, device))
    return rows


@contextmanager
def _bench(sizes: Sizes, device: str, folder: str | None) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="sessionkv-bench-", dir=folder) as name:
        bench = Bench(Path(name), sizes, device)
        try:
            yield bench
        finally:
            bench.close()


def _plain(options: Options, sizes: Sizes, device: str) -> list[Row]:
    """One pinned tensor, out and in."""
    is_cuda = device == "cuda"
    there = torch.zeros(sizes.plain_bytes, dtype=torch.uint8, device=device)
    here = torch.zeros(sizes.plain_bytes, dtype=torch.uint8, pin_memory=is_cuda)

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        if is_cuda:
            torch.cuda.synchronize()

    return [
        _speed("plain device to host", options, sizes.plain_bytes, lambda: copy(here, there)),
        _speed("plain host to device", options, sizes.plain_bytes, lambda: copy(there, here)),
    ]


def _host(options: Options, bench: Bench, plain: Sequence[Row]) -> list[Row]:
    down = list(zip(bench.device_ids, bench.host_ids, strict=True))
    up = [(host, device) for device, host in down]
    half = len(down) // 2
    num_bytes = len(down) * GEOMETRY.block_bytes

    def spill() -> None:
        bench.await_results(bench.submit(Tier.DEVICE, Tier.HOST, down))

    def fetch() -> None:
        bench.await_results(bench.submit(Tier.HOST, Tier.DEVICE, up))

    def both() -> None:
        count = bench.submit(Tier.DEVICE, Tier.HOST, down[:half])
        bench.await_results(count + bench.submit(Tier.HOST, Tier.DEVICE, up[half:]))

    rows = [
        _speed("blocks device to host", options, num_bytes, spill),
        _speed("blocks host to device", options, num_bytes, fetch),
        _speed("blocks, both ways at once", options, num_bytes, both),
    ]
    for row, other in zip(rows, plain, strict=False):
        rows.append(ratio_row(f"{row.name} / plain", row, other, bound=(">=", 0.9)))
    return rows


def _disk(options: Options, bench: Bench) -> list[Row]:
    count = bench.sizes.disk_blocks
    num_bytes = count * GEOMETRY.block_bytes
    down = [(device, -1) for device in bench.device_ids[:count]]

    def write() -> None:
        bench.await_results(bench.submit(Tier.DEVICE, Tier.DISK, down))

    written = num_bytes / timed(write) / 1e9
    targets = bench.device_ids[::-1][:count]
    up = list(zip(bench.slots(), targets, strict=True))

    def read() -> None:
        bench.await_results(bench.submit(Tier.DISK, Tier.DEVICE, up))

    cold = []
    for _ in range(min(2, options.repeats)):
        forget_pages(bench.folder)
        cold.append(num_bytes / timed(read) / 1e9)
    if not torch.equal(bench.pool[targets], bench.pool[bench.device_ids[:count]]):
        raise RuntimeError("other bytes came back from the disk")
    return [
        Row("device to disk", written, "GB/s"),
        median_row("disk to device, cold", cold, "GB/s"),
        _speed("disk to device, warm", options, num_bytes, read),
    ]


def _pinning(sizes: Sizes, device: str) -> Row:
    copier = GpuCopier(torch.zeros((1, 1), dtype=torch.uint8, device=device))
    memory = reserve(sizes.pin_bytes)

    def pin() -> None:
        copier.pin(memory, GEOMETRY.block_bytes)
        copier.wait_pinned()

    spent_s = timed(pin)
    if device == "cuda" and not torch.frombuffer(memory[-8:], dtype=torch.uint8).is_pinned():
        raise RuntimeError("not all of it was pinned")
    copier.close()
    return Row(f"pinning {sizes.pin_bytes / 2**30:g} GiB", spent_s, "s", bound=("<=", 2.0))


def _speed(name: str, options: Options, num_bytes: int, action: Callable[[], None]) -> Row:
    action()
    samples = [num_bytes / timed(action) / 1e9 for _ in range(options.repeats)]
    return Row(name, statistics.median(samples), "GB/s", len(samples), samples=tuple(samples))


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.movers", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="where the disk tier is to lie")
    args = parser.parse_args()
    rows = measure(Options(repeats=args.repeats), folder=args.folder)
    print(as_table(rows))
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
