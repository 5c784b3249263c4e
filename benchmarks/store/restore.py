"""How long a restore keeps the interpreter lock from the thread that decodes meanwhile.

Two questions. How long a thread waits for the lock, with an interpreter set as ``serve`` sets it:
behind several threads it waits for each. And how long one thread keeps it: with an interval of
nothing a thread gives it up at its next bytecode, so no single call keeps it longer than the
longest wait then, and no thread longer than that and the interval of ``serve``. That is a bound
from above: a wait holds also what the system takes to wake a thread, which the row of a probe with
nothing running shows by itself.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import TracebackType

from benchmarks.report import Row, median_row, percentile, timed
from benchmarks.store.contenders import Segments
from benchmarks.store.options import StoreOptions
from benchmarks.store.shapes import Load, arena, forget_pages, load
from sessionkv.actor.serve import SWITCH_INTERVAL_S, share_interpreter

ABOUT = "one lookup and one transfer of a long history, a thread beside it asking for the lock"
_PAUSE_S = 0.0002
_AT_ONCE_S = 1e-6


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
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        path = Path(name) / "store"
        side = Segments(path, work, into=into)
        side.write(range(blocks))
        for _ in range(options.repeats):
            with LockProbe() as probe:
                time.sleep(0.5)
            found["longest wait, nothing running"].append(1e3 * max(probe.late_s))
            for pages in ("cold", "warm"):
                if pages == "cold":
                    forget_pages(path)
                late_s, rate = _watched(side, work, into, SWITCH_INTERVAL_S)
                found[f"longest wait, {pages} restore"].append(1e3 * max(late_s))
                found[f"99th percentile, {pages} restore"].append(1e3 * percentile(late_s, 99))
                found[f"{pages} restore"].append(rate)
            late_s, _ = _watched(side, work, into, _AT_ONCE_S)
            found["longest call and waking, warm restore"].append(1e3 * max(late_s))
            kept_s = SWITCH_INTERVAL_S + max(late_s)
            found["longest kept by one thread, warm restore"].append(1e3 * kept_s)
        side.close()
    return [_row(f"{blocks} blocks of {size_kib} KiB", what, found[what]) for what in found]


def _row(name: str, what: str, samples: list[float]) -> Row:
    unit = "MB/s" if what in ("cold restore", "warm restore") else "ms"
    bound = ("<=", 1.0) if what.startswith("longest kept") else None
    return median_row(f"{name}: {what}", samples, unit, bound=bound)


def _watched(
    side: Segments, work: Load, into: list[memoryview], switch_interval_s: float
) -> tuple[list[float], float]:
    """All waits of one restore, and its MB/s. What was found is kept, as an engine's index does."""
    gc.collect()
    before_s, collect_after = sys.getswitchinterval(), gc.get_threshold()
    share_interpreter()
    sys.setswitchinterval(switch_interval_s)
    kept: list[object] = []
    try:
        with LockProbe() as probe:
            spent_s = timed(lambda: kept.append(side.restore(len(work.records), into)))
    finally:
        sys.setswitchinterval(before_s)
        gc.set_threshold(*collect_after)
    return probe.late_s, work.total_bytes / spent_s / 1e6
