"""How fast checksums are made, against how fast the disk reads: they must not be what limits."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.report import Row, median_row, ratio_row, timed
from benchmarks.store.contenders import RawFile
from benchmarks.store.options import StoreOptions
from benchmarks.store.shapes import forget_pages, load
from sessionkv.store.record import RecordLayout

ABOUT = "headers with their checksums on one core, against cold sequential reads of a file"


def measure(options: StoreOptions) -> list[Row]:
    """One thread's rate over blocks that are not in the processor's caches."""
    rows: list[Row] = []
    for size_kib in options.sizes_kib:
        work = load(size_kib, min(options.store_bytes, 2**29))
        layout = RecordLayout(bytes(32), work.geometry)
        made, read = [], []
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            path = Path(name) / "raw"
            raw = RawFile(path, work)
            raw.write(range(len(work.records)))
            for _ in range(options.repeats):
                start_s = time.perf_counter()
                for number, record in enumerate(work.records):
                    layout.header(record, work.payload(number))
                made.append(work.total_bytes / (time.perf_counter() - start_s) / 1e6)
                forget_pages(path)
                read.append(work.total_bytes / timed(raw.read) / 1e6)
            raw.close()
        sums = median_row(f"{size_kib} KiB: checksums", made, "MB/s")
        disk = median_row(f"{size_kib} KiB: raw cold read", read, "MB/s")
        label = f"{size_kib} KiB: checksums / raw cold read"
        rows += [sums, disk, ratio_row(label, sums, disk, bound=(">=", 1.0))]
    return rows
