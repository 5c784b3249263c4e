"""Ten thousand harms to a store's files, and that none of them is ever served.

Flipped bits, truncated, zeroed, overwritten, grown, removed and outdated files, swapped and copied
records, swapped pages of the index. After each the store must open, hand on only what it was given,
forget and count the rest, and take it anew. A sample is of whole engines, whose every answer must
be a cold engine's, and of journals. The run stops at the first violation.

    python -m benchmarks.store.integrity [--trials 10000] [--engines 200] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.builders.integrity import Outcome, harm_engine, harm_journal, harm_store


def run(trials: int = 10_000, engines: int = 200, *, seed: int = 1) -> dict[str, Any]:
    """Harm stores, and a sample of whole engines and of their journals; figures as plain values.

    Raises:
        AssertionError: Something wrong was served, or the process ended by a signal.
    """
    return {
        "blocks": _timed(harm_store, trials, seed),
        "engines": _timed(harm_engine, engines, seed),
        "journals": _timed(harm_journal, engines, seed),
    }


def _timed(harm: Callable[..., Outcome], trials: int, seed: int) -> dict[str, Any]:
    began_s = time.monotonic()
    outcome = harm(trials, seed=seed)
    return {
        **asdict(outcome),
        "trials": sum(outcome.trials.values()),
        "kinds": dict(outcome.trials),
        "elapsed_s": time.monotonic() - began_s,
    }


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    blocks, engines, journals = (figures[name] for name in ("blocks", "engines", "journals"))
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(blocks["kinds"].items()))
    return "\n".join(
        (
            f"block store: {blocks['trials']:,} harms in {blocks['elapsed_s']:.0f} s ({kinds})",
            f"  served right {blocks['served']:,} (one served wrong ends the run), found bad and "
            f"removed {blocks['bad']:,}, not found {blocks['absent']:,}; without effect "
            f"{blocks['harmless']:,} harms",
            f"engines: {engines['trials']:,} harms of their blocks, every answer a cold engine's; "
            f"{engines['bad']:,} bad blocks removed, {engines['served']:,} tokens from disk",
            f"journals: {journals['trials']:,} harms; {journals['served']:,} sessions as they "
            f"were, {journals['absent']:,} older or gone, none wrong",
        )
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--engines", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = run(options.trials, options.engines, seed=options.seed)
    sys.stdout.write(table(figures) + "\n")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
