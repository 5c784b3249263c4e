"""What core costs without its runner: a step, and a token with events and journal included."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any

from benchmarks.engines import CHECKSUM_CONFIG, exactly
from benchmarks.keeping import KeepingFront
from benchmarks.report import Options, Row, median_row
from sessionkv.engine.build import build_engine
from sessionkv.engine.core import Core
from sessionkv.engine.messages import OpenSession, SubmitTurn
from sessionkv.engine.runner import LaterResult
from sessionkv.types import StepOutput, StepPlan

ABOUT = "processor time of the core thread, checksum runner's own time taken off"
PROMPT = 16
GENERATED = 200


class _TimedRunner:
    """Passes everything on and adds up the processor time of the steps themselves."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.spent_s = 0.0
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> LaterResult:
        return LaterResult(lambda: self._execute(plan))

    def _execute(self, plan: StepPlan) -> StepOutput:
        start = time.thread_time()
        output: StepOutput = self._runner.execute(plan)
        self.spent_s += time.thread_time() - start
        self.steps += 1
        return output


def _run(sequences: int) -> tuple[float, float]:
    """Microseconds a step and a token of one run with so many sequences at once."""
    built = build_engine(CHECKSUM_CONFIG)
    try:
        runner = _TimedRunner(built.parts.runner)
        front = KeepingFront(sequences)
        core = Core(replace(built.parts, runner=runner), built.inbox, front)
        front.inbox = core.inbox
        for number in range(sequences):
            name = f"s{number}"
            core.inbox.put(OpenSession(number, "local", name, None, None, b"", None))
            tokens = [(number * 7 + i) % 200 for i in range(PROMPT)]
            sampling = replace(exactly(GENERATED), seed=number)
            turn = SubmitTurn(number, "local", name, tokens, 0, b"", b"", sampling, frozenset())
            core.inbox.put(turn)
        gc.collect()
        gc.freeze()  # what is there before the first turn, as ``serve`` does
        start = time.thread_time()
        core.run()
        spent_s = time.thread_time() - start - runner.spent_s
    finally:
        gc.unfreeze()
        built.resources.close()
    return spent_s / runner.steps * 1e6, spent_s / (sequences * GENERATED) * 1e6


def measure(options: Options) -> list[Row]:
    """A new core for each sample; the whole of its life counts, admission and journal included."""
    rows = []
    for sequences, limit in ((8, 100.0), (256, 2500.0)):
        _run(sequences)
        samples = [_run(sequences) for _ in range(options.repeats)]
        steps, tokens = zip(*samples, strict=True)
        name = f"{sequences} sequences"
        rows.append(median_row(f"a step, {name}", steps, "us", bound=("<=", limit)))
        rows.append(median_row(f"a token, {name}", tokens, "us", bound=("<=", 20.0)))
    return rows
