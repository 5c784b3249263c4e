"""``sessionkv config show``: every value of the configuration and where it came from."""

from __future__ import annotations

import argparse

from sessionkv.cli import output
from sessionkv.cli.settings import config_from, sources_from
from sessionkv.config import flatten


def run(args: argparse.Namespace) -> int:
    """Print the effective configuration of ``serve`` with these flags."""
    values, sources = flatten(config_from(args)), sources_from(args)
    shown = {
        name: {"value": value, "source": sources.get(name, "default")}
        for name, value in values.items()
    }
    if args.json:
        output.print_json(shown)
    else:
        rows = [
            (name, _in_words(name, item["value"]), item["source"]) for name, item in shown.items()
        ]
        output.stdout().print(output.table(("field", "value", "from"), rows))
    return 0


def _in_words(name: str, value: object) -> str:
    if value is None:
        return "auto"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if name.endswith("_bytes"):
        return output.size(value)
    unit = {"s": " s", "ms": " ms"}.get(name.rpartition("_")[2], "")
    return f"{value:,g}{unit}" if isinstance(value, float) else f"{value:,}{unit}"
