"""``sessionkv stats``: all metrics of the running engine."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType

from sessionkv.cli import output
from sessionkv.cli.connect import connect
from sessionkv.cli.watching import watch


def run(args: argparse.Namespace) -> int:
    """Print what the engine counts, one table for each group."""
    with connect(args) as client:
        if args.watch is not None and not args.json:
            return watch(lambda: _tables(client.stats()), every_s=args.watch)
        stats = client.stats()
    if args.json:
        output.print_json(stats)
        return 0
    output.stdout().print(_tables(stats))
    return 0


def _tables(stats: Mapping[str, Any]) -> Group:
    parts: list[RenderableType] = []
    for title, values in _groups(stats):
        parts += [*([""] if parts else []), output.pairs(values, title=title)]
    return Group(*parts)


def _groups(stats: Mapping[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """Plain values first, then one group for each nested map, deeper maps by dotted names."""
    plain = {key: _shown(key, value) for key, value in stats.items() if not _is_map(value)}
    groups = [("engine", plain)] if plain else []
    for key, value in stats.items():
        if _is_map(value) and value:
            groups.append((key, {name: _shown(name, v) for name, v in _flat(value).items()}))
    return groups


def _is_map(value: Any) -> bool:
    return isinstance(value, Mapping)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key == "buckets":
            continue  # for programs; people have the quantiles
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _shown(name: str, value: Any) -> str:
    """Units by the name's ending, as everywhere in the project."""
    if isinstance(value, list):
        return "; ".join(str(item) for item in value) or "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-" if value in (None, "") else str(value)
    if name.endswith("_bytes"):
        return output.size(value)
    if name.endswith("_rate"):
        return f"{value:.1%}"
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
    for unit in () if name.endswith("_per_s") else ("_ms", "_s"):
        if name.endswith(unit):
            return f"{text} {unit[1:]}"
    return text
