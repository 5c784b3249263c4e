"""How long a restore keeps the interpreter lock from the thread that decodes meanwhile."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType

from benchmarks.report import Row, median_row, percentile, timed
from benchmarks.store.contenders import Segments
from benchmarks.store.options import StoreOptions
from benchmarks.store.shapes import Load, arena, forget_pages, load

ABOUT = "one lookup and one transfer of a long history, a thread beside it asking for the lock"
_PAUSE_S = 0.0002


class LockProbe:
    """A thread that sleeps and wakes, and notes how much later than asked it went on.

    It runs before all others where the system lets it, so that what it waits for is the
    interpreter lock and not a core.

    Attributes:
        is_urgent: Whether it does.
    """

    def __init__(self) -> None:
        """Prepare."""
        self.late_s: list[float] = []
        self.is_urgent = False
        self._ended = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> LockProbe:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._thread.join()

    def _run(self) -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
            self.is_urgent = True
        except (OSError, AttributeError):
            pass
        self._ready.set()
        while not self._ended:
            start_s = time.perf_counter()
            time.sleep(_PAUSE_S)
            self.late_s.append(time.perf_counter() - start_s - _PAUSE_S)


def measure(options: StoreOptions) -> list[Row]:
    """Cold and warm restores, and the same probe while nothing happens."""
    rows: list[Row] = []
    for size_kib in options.sizes_kib:
        if options.restore_blocks * size_kib * 1024 > 2 * options.store_bytes:
            continue
        rows += _of_size(options, size_kib)
    return rows


def _of_size(options: StoreOptions, size_kib: int) -> list[Row]:
    work = load(size_kib, options.restore_blocks * size_kib * 1024)
    blocks = len(work.records)
    into = arena(blocks, work.geometry.block_bytes)
    idle: list[float] = []
    cold, warm, cold_p99, warm_p99, cold_speed, warm_speed = (list[float]() for _ in range(6))
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        path = Path(name) / "store"
        side = Segments(path, work, into=into)
        side.write(range(blocks))
        for _ in range(options.repeats):
            with LockProbe() as probe:
                time.sleep(0.5)
            idle.append(1e3 * max(probe.late_s))
            forget_pages(path)
            for longest, late, speed in (
                (cold, cold_p99, cold_speed),
                (warm, warm_p99, warm_speed),
            ):
                most, usual, rate = _watched(side, work, into)
                longest.append(most)
                late.append(usual)
                speed.append(rate)
        side.close()
    name = f"{blocks} blocks of {size_kib} KiB"
    bound = ("<=", 1.0)
    return [
        median_row(f"{name}: longest wait, nothing running", idle, "ms"),
        median_row(f"{name}: longest wait, cold restore", cold, "ms", bound=bound),
        median_row(f"{name}: longest wait, warm restore", warm, "ms", bound=bound),
        median_row(f"{name}: 99th percentile, cold restore", cold_p99, "ms"),
        median_row(f"{name}: 99th percentile, warm restore", warm_p99, "ms"),
        median_row(f"{name}: cold restore", cold_speed, "MB/s"),
        median_row(f"{name}: warm restore", warm_speed, "MB/s"),
    ]


def _watched(side: Segments, work: Load, into: list[memoryview]) -> tuple[float, float, float]:
    """Longest wait and 99th percentile in ms, and MB/s, of one restore."""
    gc.collect()
    with LockProbe() as probe:
        spent_s = timed(lambda: side.restore(len(work.records), into))
    longest, usual = max(probe.late_s), percentile(probe.late_s, 99)
    return 1e3 * longest, 1e3 * usual, work.total_bytes / spent_s / 1e6
