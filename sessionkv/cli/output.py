"""How things look in the terminal: numbers, tables, JSON. Knows no engine."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_FILE_WIDTH = 10_000
"""Columns where nobody looks: names and paths in a pipe are never folded over lines."""


class _Console(Console):
    """Leaves a reader that went away to ``main``; rich would end the process with code 1."""

    def on_broken_pipe(self) -> None:
        """Pass the error on."""
        raise  # what rich is handling when it calls this


def stdout() -> Console:
    """Console on standard output; plain text of any width where that is not a terminal."""
    return _console(sys.stdout.isatty(), stderr=False)


def stderr() -> Console:
    """Console on standard error, for progress and remarks."""
    return _console(sys.stderr.isatty(), stderr=True)


def _console(is_terminal: bool, *, stderr: bool) -> Console:
    width = None if is_terminal else _FILE_WIDTH
    return _Console(stderr=stderr, highlight=False, soft_wrap=not is_terminal, width=width)


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


def count(number: int, noun: str) -> str:
    """``1 turn``, ``2,000 turns``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def one_line(text: str) -> str:
    """Text with control characters escaped, so that a name cannot steer the terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


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
