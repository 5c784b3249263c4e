"""How things look in the terminal: numbers, the cache line, tables. Knows no engine."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sessionkv.types import CacheReport, MissReason


def stdout() -> Console:
    """Console on standard output; plain text where that is not a terminal."""
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def stderr() -> Console:
    """Console on standard error, for progress and remarks."""
    return Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


def print_json(value: Any) -> None:
    """One JSON document on standard output; enums as their values, paths as text."""
    text = json.dumps(value, indent=2, default=_plain, ensure_ascii=False)
    sys.stdout.write(text + "\n")


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else str(value)


def size(num_bytes: float | None) -> str:
    """``1.5 GiB``; a dash for None."""
    if num_bytes is None:
        return "-"
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def duration(seconds: float | None) -> str:
    """``45 s``, ``12 min``, ``3 h``, ``2 d``; a dash for None."""
    if seconds is None:
        return "-"
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def one_line(text: str) -> str:
    """Text with control characters escaped, so that a name cannot steer the terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def cache_line(report: CacheReport) -> str:
    """Where the prompt came from, how fast it went and why anything was missed, on one line."""
    parts = [
        f"prompt {report.prompt_tokens:,} = {report.device_tokens:,} device"
        f" + {report.host_tokens:,} host + {report.disk_tokens:,} disk"
        f" + {report.computed_tokens:,} computed",
        f"first token {report.ttft_ms:,.0f} ms",
    ]
    if report.decode_tokens_per_s:
        parts.append(f"{report.decode_tokens_per_s:,.1f} tok/s")
    if report.recomputed_tokens:
        parts.append(f"{report.recomputed_tokens:,} recomputed")
    parts.append(miss_text(report))
    return " · ".join(parts)


def miss_text(report: CacheReport) -> str:
    """``no miss``, or the reason with the place and what differed."""
    miss = report.miss
    if miss.reason is MissReason.NONE:
        return "no miss"
    text = f"miss: {miss.reason.value}"
    if miss.token is not None and miss.reason is not MissReason.FIRST_TURN:
        text += f" from token {miss.token:,}"
        if miss.turn is not None:
            text += f" (turn {miss.turn})"
    if miss.expected is not None or miss.found is not None:
        text += f", {miss.expected!r} became {miss.found!r}"
    return text


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str = "") -> Table:
    """A plain table; columns whose name starts with ``>`` are aligned to the right."""
    built = Table(
        title=title or None,
        title_justify="left",
        box=None,
        pad_edge=False,
        show_header=any(columns),
    )
    for column in columns:
        right = column.startswith(">")
        built.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        built.add_row(*(Text(one_line(str(cell))) for cell in row))
    return built


def pairs(values: Mapping[str, Any], *, title: str = "") -> Table:
    """A table of names and values."""
    return table(("", ""), values.items(), title=title)
