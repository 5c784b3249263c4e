"""Writing and reading whole stores: the product against a plain file of the same bytes."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Row, median_row, timed
from benchmarks.store.contenders import (
    TRANSFER_BLOCKS,
    Contender,
    RawFile,
    Segments,
    Values,
)
from benchmarks.store.options import StoreOptions
from benchmarks.store.shapes import Load, forget_pages, load
from benchmarks.store.written import Written

ABOUT = "block store against sequential write + fsync and sequential read of a file, same run"
COLD_READS = 3
CHURN_SHARE = 20  # one in so many blocks is free when the next are written: 95% full


@dataclass(slots=True)
class Sample:
    """Figures of one store of one kind, MB/s unless said."""

    write: float = 0.0
    cold: float = 0.0
    warm: float = 0.0
    churn_write: float = 0.0
    churn_cold: float = 0.0
    amplification: float = 0.0
    churn_amplification: float = 0.0
    device_amplification: float = 0.0
    churn_device_amplification: float = 0.0


def measure(options: StoreOptions) -> list[Row]:
    """Raw file and product in turn, so that both meet the same disk."""
    rows: list[Row] = []
    for size_kib in options.sizes_kib:
        work = load(size_kib, options.store_bytes, chain_blocks=TRANSFER_BLOCKS)
        raw, own = [], []
        for _ in range(options.repeats):
            raw.append(one_round(options, work, RawFile))
            own.append(one_round(options, work, _product, churn=True))
            print(f"{size_kib} KiB: {len(own)} of {options.repeats}", flush=True)
        rows += _rows(f"{size_kib} KiB", raw, own)
    return rows


def measure_values(options: StoreOptions) -> list[Row]:
    """Values inside LMDB, synchronous and not, and the product, by turns; no bounds."""
    rows: list[Row] = []
    for size_kib in options.sizes_kib:
        work = load(size_kib, options.store_bytes, chain_blocks=TRANSFER_BLOCKS)
        samples: dict[str, list[Sample]] = {name: [] for name in _WAYS}
        for number in range(options.repeats):
            for name, make in _WAYS.items():
                samples[name].append(one_round(options, work, make, churn=True))
            print(f"{size_kib} KiB: {number + 1} of {options.repeats}", flush=True)
        for name, found in samples.items():
            label = f"{size_kib} KiB, {name}"
            rows += _speeds(label, found)
            for when, column in (("", "amplification"), (" in churn", "churn_amplification")):
                factors = [getattr(sample, column) for sample in found]
                rows.append(median_row(f"{label}: bytes written{when}", factors, "x"))
    return rows


def one_round(
    options: StoreOptions,
    work: Load,
    make: Callable[[Path, Load], Contender],
    *,
    churn: bool = False,
) -> Sample:
    """A new store: filled, read cold and warm; written over once at 95% full, read cold."""
    everything = range(len(work.records))
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        path = Path(name) / "store"
        side = make(path, work)
        sample = Sample()
        with Written(path.parent, work.total_bytes) as written:
            sample.write = _speed(work, lambda: side.write(everything))
        sample.amplification, sample.device_amplification = written.factor, written.device_factor
        side, sample.cold = _reopened(path, work, make, side)
        sample.warm = _speed(work, side.read)
        if churn:
            with Written(path.parent, work.total_bytes) as written:
                sample.churn_write = _speed(work, lambda: _churn(side, len(everything)))
            sample.churn_amplification = written.factor
            sample.churn_device_amplification = written.device_factor
            side, sample.churn_cold = _reopened(path, work, make, side)
        side.close()
    return sample


def _product(path: Path, work: Load) -> Contender:
    return Segments(path, work)


def _values(path: Path, work: Load) -> Contender:
    return Values(path, work, sync=True)


def _values_synced_at_end(path: Path, work: Load) -> Contender:
    return Values(path, work, sync=False)


_WAYS: dict[str, Callable[[Path, Load], Contender]] = {
    "segment files": _product,
    "LMDB values, sync": _values,
    "LMDB values, no sync but at the end": _values_synced_at_end,
}


def _reopened(
    path: Path, work: Load, make: Callable[[Path, Load], Contender], side: Contender
) -> tuple[Contender, float]:
    """The store opened anew, and the median rate of reading it without the page cache.

    Read once before that is measured: a disk may be virtual, and what stands behind it is then to
    have seen every contender's files equally often.
    """
    speeds = []
    for _ in range(1 + COLD_READS):
        side.close()  # what is mapped cannot be forgotten
        forget_pages(path)
        side = make(path, work)
        speeds.append(_speed(work, side.read))
    return side, statistics.median(speeds[1:])


def _churn(side: Contender, total: int) -> None:
    """Forget and write again every history, in random order, a twentieth at a time."""
    starts = list(range(0, total, TRANSFER_BLOCKS))
    random.Random(1).shuffle(starts)
    step = max(1, len(starts) // CHURN_SHARE)
    for first in range(0, len(starts), step):
        part = [
            number
            for start in starts[first : first + step]
            for number in range(start, min(start + TRANSFER_BLOCKS, total))
        ]
        side.delete(part[::-1])
        side.write(part)


def _speed(work: Load, action: Callable[[], None]) -> float:
    return work.total_bytes / timed(action) / 1e6


def _rows(name: str, raw: Sequence[Sample], own: Sequence[Sample]) -> list[Row]:
    rows = [
        median_row(f"{name}, raw file: {what}", [getattr(s, what) for s in raw], "MB/s")
        for what in ("write", "cold", "warm")
    ]
    rows += _speeds(name, own)
    for what, against, bound in (
        ("write", "write", 0.8),
        ("churn_write", "write", 0.8),
        ("cold", "cold", 0.8),
        ("churn_cold", "cold", 0.8),
    ):
        ratios = [
            getattr(ours, what) / getattr(theirs, against)
            for ours, theirs in zip(own, raw, strict=True)
        ]
        label = f"{name}: {_words(what)} / raw {against}"
        rows.append(Row(label, statistics.median(ratios), "x", len(ratios), (">=", bound), ratios))
    for when, column in (
        ("", "amplification"),
        (" in churn", "churn_amplification"),
        (" by the device", "device_amplification"),
        (" by the device in churn", "churn_device_amplification"),
    ):
        found = [getattr(sample, column) for sample in own]
        rows.append(median_row(f"{name}: bytes written{when}", found, "x", bound=("<=", 1.1)))
    return rows


def _speeds(name: str, samples: Sequence[Sample]) -> list[Row]:
    return [
        median_row(f"{name}: {_words(what)}", [getattr(s, what) for s in samples], "MB/s")
        for what in ("write", "churn_write", "cold", "churn_cold", "warm")
    ]


def _words(what: str) -> str:
    return f"{what.removeprefix('churn_')} after churn" if what.startswith("churn_") else what
