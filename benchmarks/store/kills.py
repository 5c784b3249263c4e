"""A thousand engines killed with SIGKILL, and what the next one on the same store finds.

Engines over the checksum runner, three clients, tiers so small that blocks move all the time. Each
kill comes under load, at a gate of the store's or the movers' threads, during start-up, during a
drain, or at rest; after each the next engine must have every acknowledged change, replay keyed
turns exactly and go on as an uninterrupted run would. The run stops at the first violation.

    python -m benchmarks.store.kills [--kills 1000] [--seed 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from sessionkv import CacheConfig
from sessionkv.errors import ConfigError
from tests.builders.kill_load import Found
from tests.builders.kills import Tally, kill_engines

AGES_S = (0.0, 0.03, 0.1, 0.3, float("inf"))
"""Bounds of the classes of time between a session's last answer and the kill."""
COUNTS = (
    "acknowledged",
    "sessions_checked",
    "turns_checked",
    "replayed_acknowledged",
    "repeated_unanswered",
    "committed_unanswered",
)


def durabilities() -> list[str]:
    """Those that this version knows."""
    known = []
    for name in ("turn", "idle", "evict", "off"):
        try:
            CacheConfig(durability=name)
        except ConfigError:
            continue
        known.append(name)
    return known


def run(kills: int = 1000, *, seed: int = 1, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Kill so many engines in all, as many under each durability; figures as plain values.

    Raises:
        AssertionError: Something acknowledged was lost, something wrong was served, or a file grew
            without bound.
    """
    names = durabilities() if names is None else names
    return {
        "kills": kills,
        "durability": {
            name: _kill(name, kills * (i + 1) // len(names) - kills * i // len(names), seed)
            for i, name in enumerate(names)
        },
    }


def _kill(durability: str, kills: int, seed: int) -> dict[str, Any]:
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sessionkv-kills-") as folder:
        tally = kill_engines(Path(folder), kills, seed=seed, durability=durability)
    found = [item for account in tally.accounts for item in account.found]
    return {
        "kills": tally.kills,
        "drained": tally.drained,
        "instants": dict(tally.instants),
        "gates_not_reached": sum(tally.not_reached.values()),
        **{name: tally.total(name) for name in COUNTS},
        "found_by_age": _by_age(found),
        "journal_bytes": _growth(tally, 0),
        "blocks_bytes": _growth(tally, 1),
        "elapsed_s": time.monotonic() - began_s,
    }


def _by_age(found: Iterable[Found]) -> list[dict[str, Any]]:
    """What the first turn after a restart found, by the time from the last one to the kill."""
    rows = []
    everything = list(found)
    for low, high in pairwise(AGES_S):
        part = [item for item in everything if low <= item.age_s < high]
        known = sum(item.known for item in part)
        rows.append(
            {
                "from_s": low,
                "to_s": high if high < AGES_S[-1] else None,
                "sessions": len(part),
                "found_tokens": sum(item.cached for item in part),
                "known_tokens": known,
                "found_share": sum(item.cached for item in part) / known if known else None,
            }
        )
    return rows


def _growth(tally: Tally, column: int) -> dict[str, float]:
    """Medians over the first, middle and last third of the lives, and the most ever."""
    sizes = [row[column] for row in tally.sizes]
    third = max(1, len(sizes) // 3)
    return {
        "first_third": statistics.median(sizes[:third]),
        "middle_third": statistics.median(sizes[third : 2 * third] or sizes),
        "last_third": statistics.median(sizes[-third:]),
        "most": max(sizes),
    }


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    lines = []
    for name, it in figures["durability"].items():
        instants = Counter(it["instants"])
        gates = sum(count for key, count in instants.items() if key.startswith("gate "))
        others = ", ".join(f"{count} {key}" for key, count in sorted(instants.items())
                           if not key.startswith("gate "))  # fmt: skip
        lines += [
            f"durability {name}: {it['kills']} kills in {it['elapsed_s']:.0f} s ({others}, {gates} "
            f"at {sum(key.startswith('gate ') for key in instants)} gates)",
            f"  acknowledged changes {it['acknowledged']:,}, all there (one lost ends the run); "
            f"sessions compared {it['sessions_checked']:,}; next turns equal "
            f"{it['turns_checked']:,}",
            f"  keyed turns replayed {it['replayed_acknowledged']:,}; unanswered at the kill and "
            f"sent again {it['repeated_unanswered']:,}; unanswered changes found committed "
            f"{it['committed_unanswered']:,}",
        ]
        for row in it["found_by_age"]:
            if row["sessions"]:
                until = "" if row["to_s"] is None else f" to {row['to_s'] * 1000:.0f}"
                lines.append(
                    f"  killed {row['from_s'] * 1000:.0f}{until} ms after the turn: "
                    f"{row['sessions']} sessions, {row['found_share']:.0%} of their KV found"
                )
        for what in ("journal", "blocks"):
            sizes = it[f"{what}_bytes"]
            thirds = " / ".join(
                f"{sizes[f'{part}_third'] / 2**20:.2f}" for part in ("first", "middle", "last")
            )
            lines.append(f"  {what}, MiB in each third of the run: {thirds}")
    return "\n".join(lines)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = run(options.kills, seed=options.seed)
    sys.stdout.write(table(figures) + "\n")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
