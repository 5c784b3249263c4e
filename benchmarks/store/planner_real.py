"""The load planner on a real disk with the real model: ``python -m benchmarks.store.planner_real``.

One embedded engine, one conversation of ``--tokens`` tokens whose KV is on disk alone before each
sample. The ways take turns, with a cold and with a warm page cache: everything loaded, everything
computed, and as the planner decides. Computing is far slower than loading where histories are long,
so it may have fewer samples; the bound compares with the better of the two.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.engines import CONFIG, first_token_s
from benchmarks.peer import random_tokens
from benchmarks.report import Row, as_json, as_table, environment, median_row
from benchmarks.store.planner import ComputeAll, LoadAll
from benchmarks.store.shapes import forget_pages
from sessionkv import Engine, SamplingParams
from sessionkv.config import MIB
from sessionkv.engine.build import BuiltEngine, build_engine
from sessionkv.engine.scheduler.policy import LoadPolicy

NEW_TOKENS = 45
SLACK_MS = 3.0


class Bench:
    """An engine whose load policy can be exchanged between turns."""

    def __init__(self, model: str, store: Path, threads: int) -> None:
        self.store = store
        self._num_samples = 0
        cache = replace(CONFIG.cache, host_bytes=0, device_bytes=1024 * MIB)
        config = replace(CONFIG, model=model, store=store, threads=threads, cache=cache)
        self.engine = Engine(config, build=self._build)
        self.planned = self.built.parts.planner.meet

    def _build(self, *args: object, **fields: object) -> BuiltEngine:
        self.built = build_engine(*args, **fields)  # type: ignore[arg-type]
        return self.built

    def use(self, policy: LoadPolicy | None) -> None:
        """Decide like this from now on; None is the planner."""
        meet = self.planned if policy is None else policy.meet
        self.built.parts.planner.meet = meet  # type: ignore[method-assign]

    def sample(self, policy: LoadPolicy | None, *, cold: bool) -> tuple[float, str]:
        """Milliseconds to the first token of one more turn, and its cache report.

        What is new in it is new each time: nothing of it may be found.
        """
        self._num_samples += 1
        self.engine.flush()
        # The engine is idle: nobody else uses the books now.
        self.built.parts.kv.forget(self.built.parts.kv.resident_keys())
        if cold:
            forget_pages(self.store / "blocks")
        self.use(policy)
        session = self.engine.session("long")
        seconds = first_token_s(session, random_tokens(NEW_TOKENS, self._num_samples))
        report = session.info().last_cache
        session.rewind(turns=1)
        return seconds * 1000.0, str(report)


def measure(args: argparse.Namespace, store: Path) -> list[Row]:
    """All ways by turns; the first round warms up and teaches the rates."""
    bench = Bench(args.model, store, args.threads)
    once = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    found: dict[str, list[float]] = {}
    with bench.engine as engine:
        tokens = random_tokens(args.tokens, 0)
        engine.open("long").turn(tokens=tokens, sampling=once)
        ways: list[tuple[str, LoadPolicy | None]] = [("load", LoadAll()), ("planned", None)]
        for number in range(-1, args.samples):
            for cold in (True, False):
                for name, policy in ways if number % 2 else ways[::-1]:
                    cache = "cold" if cold else "warm"
                    ms, report = bench.sample(policy, cold=cold)
                    if number >= 0:
                        found.setdefault(f"{name}, {cache}", []).append(ms)
                    if number == 0:
                        print(f"{name}, {cache}: {report}", flush=True)
            if 0 <= number < args.compute_samples:
                ms, _ = bench.sample(ComputeAll(), cold=False)
                found.setdefault("compute", []).append(ms)
    return _rows(args.tokens, found)


def _rows(tokens: int, found: dict[str, list[float]]) -> list[Row]:
    made = {name: median_row(f"{tokens:,}: {name}", found[name], "ms") for name in found}
    rows = list(made.values())
    for cache in ("cold", "warm"):
        better = min(
            row.value for name, row in made.items() if name in ("compute", f"load, {cache}")
        )
        planned = made[f"planned, {cache}"]
        bound = ("<=", round(1.05 + SLACK_MS / better, 4))
        name = f"{tokens:,}: {cache}, planned / better of load and compute"
        rows.append(Row(name, planned.value / better, "x", planned.n, bound))
    return rows


def main() -> int:
    """One length; run it once for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--compute-samples", type=int, default=15)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    print(" · ".join(f"{key}: {value}" for key, value in environment().items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="sessionkv-bench-", dir=args.dir) as folder:
        rows = measure(args, Path(folder))
    print(as_table(rows))
    if args.json:
        args.json.write_text(as_json({"planner_real": rows}) + "\n")
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
