"""The frame all benchmarks share: repeat, take medians, say on what they were measured.

A benchmark is a module of this package with ``ABOUT`` and ``measure(options) -> list[Row]``.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Options:
    """What every benchmark is told."""

    model: str = "smollm2-135m"
    repeats: int = 5
    threads: int = 2


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: the median of ``n`` samples, against a bound where there is one.

    Attributes:
        bound: ``("<=", 0.8)`` or ``(">=", 1.5)``; None for a figure that is only reported.
    """

    name: str
    value: float
    unit: str
    n: int = 1
    bound: tuple[str, float] | None = None
    samples: Sequence[float] = field(default=(), repr=False)

    @property
    def met(self) -> bool | None:
        """Whether the bound holds; None without one."""
        if self.bound is None:
            return None
        sign, limit = self.bound
        return self.value <= limit if sign == "<=" else self.value >= limit


def median_row(
    name: str, samples: Sequence[float], unit: str, *, bound: tuple[str, float] | None = None
) -> Row:
    """A row from samples."""
    return Row(name, statistics.median(samples), unit, len(samples), bound, tuple(samples))


def ratio_row(name: str, over: Row, under: Row, *, bound: tuple[str, float] | None = None) -> Row:
    """The ratio of two rows' medians, measured in the same run."""
    return Row(name, over.value / under.value, "x", min(over.n, under.n), bound)


def timed(action: Callable[[], Any]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def percentile(samples: Sequence[float], percent: float) -> float:
    """The sample at or above ``percent`` of all samples (nearest rank)."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def environment() -> dict[str, Any]:
    """Hardware, versions and commit."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "transformers", "pyzmq", "lmdb")},
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "-"


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError:  # no git here
        return "unknown"
    return done.stdout.strip() or "unknown"


def as_table(rows: Sequence[Row]) -> str:
    """A Markdown table."""
    lines = ["| figure | median | n | bound | met |", "|---|---|---|---|---|"]
    for row in rows:
        bound = "" if row.bound is None else f"{row.bound[0]} {row.bound[1]:g} {row.unit}"
        met = {None: "", True: "yes", False: "**no**"}[row.met]
        lines.append(f"| {row.name} | {row.value:,.4g} {row.unit} | {row.n} | {bound} | {met} |")
    return "\n".join(lines)


def as_json(results: dict[str, Sequence[Row]]) -> str:
    """Everything, samples included."""
    figures = {
        name: [asdict(row) | {"met": row.met} for row in rows] for name, rows in results.items()
    }
    return json.dumps({"environment": environment(), "figures": figures}, indent=2)
