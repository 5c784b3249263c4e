"""What the machine itself can do: the figures that others are read against."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu.tiers import PINNED
from benchmarks.report import Row
from benchmarks.store.shapes import forget_pages

COPIED_BYTES = 2**30
MATRIX = 8192
FILE_BYTES = 2**31
PIECE_BYTES = 16 * 2**20


def describe() -> dict[str, str]:
    """Name and memory of the GPU, driver and versions; empty without one. Loads torch."""
    import torch

    if not torch.cuda.is_available():
        return {}
    import triton

    found = torch.cuda.get_device_properties(0)
    try:
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, check=False,
        ).stdout.strip()  # fmt: skip
    except OSError:
        driver = "unknown"
    return {
        "gpu": f"{found.name}, {found.total_memory / 2**30:.0f} GiB",
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
    }


def ceilings(folder: Path) -> list[Row]:
    """Copies on the device and over the bus, a matrix product, the disk below ``folder``."""
    import torch

    def seconds(action: Callable[[], object], repeats: int = 7) -> float:
        action()
        samples = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            began = time.perf_counter()
            action()
            torch.cuda.synchronize()
            samples.append(time.perf_counter() - began)
        return statistics.median(samples)

    there = torch.empty((2, COPIED_BYTES), dtype=torch.uint8, device="cuda").zero_()
    here = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    a, b = (torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    copied = 2 * COPIED_BYTES / seconds(lambda: there[1].copy_(there[0]))
    up = COPIED_BYTES / seconds(lambda: there[0].copy_(here, non_blocking=True))
    down = COPIED_BYTES / seconds(lambda: here.copy_(there[0], non_blocking=True))
    product = 2 * MATRIX**3 / seconds(lambda: a @ b)
    return [
        Row("device copy, read and written", copied / 1e9, "GB/s", 7),
        Row(PINNED, up / 1e9, "GB/s", 7),
        Row("pinned copy, device to host", down / 1e9, "GB/s", 7),
        Row(f"bf16 product of {MATRIX:,} x {MATRIX:,}", product / 1e12, "TFLOP/s", 7),
        *disk(folder),
    ]


def disk(folder: Path, size: int = FILE_BYTES) -> list[Row]:
    """A file written with its pages flushed, and read cold and warm, by one thread."""
    path = folder / "ceiling"
    piece = memoryview(bytearray(os.urandom(PIECE_BYTES)))
    count = size // len(piece)
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(count):
            file.write(piece)
        os.fsync(file.fileno())
    rates = {"written": count * len(piece) / (time.perf_counter() - began)}
    forget_pages(path)
    for state in ("cold", "warm"):
        began = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.readinto(piece):
                pass
        rates[f"read {state}"] = count * len(piece) / (time.perf_counter() - began)
    path.unlink()
    return [Row(f"disk, one thread, {name}", rate / 1e9, "GB/s") for name, rate in rates.items()]
