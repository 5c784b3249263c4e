"""What text and clients take from the step loop: an engine's steps with them and without.

The runner stands in for a device: checksums, and a step takes :data:`STEP_S` at least, so that 256
sequences make some 20,000 tokens a second. What is over is the host's.
"""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.engines import CHECKSUM_CONFIG, exactly
from benchmarks.keeping import KeepingFront
from benchmarks.report import Options, Row, median_row, percentile, ratio_row
from sessionkv import Client, EngineConfig
from sessionkv.engine.messages import SubmitTurn
from sessionkv.engine.runner import LaterResult
from sessionkv.types import StepOutput, StepPlan

ABOUT = "steps of 256 sequences with clients and text against core alone, checksum runner"
SEQUENCES = 256
GENERATED = 500
STEP_S = 0.0125


@dataclass(frozen=True, slots=True)
class _Steps:
    """What one engine did while all sequences decoded.

    Attributes:
        intervals_ms: From the end of one step to the end of the next.
        core_us: Processor time of the core thread for each token, the runner's own taken off.
    """

    intervals_ms: list[float]
    core_us: float


class _Device:
    """Passes everything on; a step takes its time, and full ones are noted."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._own_s = 0.0
        self._ends: list[float] = []
        self._spent_s: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> LaterResult:
        launched = time.perf_counter()
        return LaterResult(lambda: self._result(plan, launched))

    def _result(self, plan: StepPlan, launched: float) -> StepOutput:
        start = time.thread_time()
        output: StepOutput = self._runner.execute(plan)
        self._own_s += time.thread_time() - start
        time.sleep(max(0.0, launched + STEP_S - time.perf_counter()))
        if len(plan.steps) == SEQUENCES:
            self._ends.append(time.perf_counter())
            self._spent_s.append(time.thread_time() - self._own_s)
        return output

    def steps(self) -> _Steps:
        ends, spent = self._ends, self._spent_s
        intervals = [1000 * (b - a) for a, b in itertools.pairwise(ends)]
        tokens = SEQUENCES * len(intervals)
        return _Steps(intervals, (spent[-1] - spent[0]) / tokens * 1e6)


def _build(config: EngineConfig, **arguments: Any) -> tuple[Any, _Device]:
    from sessionkv.engine.build import build_engine

    built = build_engine(config, **arguments)
    device = _Device(built.parts.runner)
    return replace(built, parts=replace(built.parts, runner=device)), device


def _alone(line: Connection) -> None:
    """Core without clients, front and text."""
    from sessionkv.engine.core import Core

    built, device = _build(CHECKSUM_CONFIG)
    front = KeepingFront(SEQUENCES)
    front.inbox = built.inbox
    core = Core(built.parts, built.inbox, front)
    for number in range(SEQUENCES):
        sampling = replace(exactly(GENERATED), seed=number)
        core.inbox.put(
            SubmitTurn(number, "local", None, [number, 1], 0, b"", b"", sampling, frozenset())
        )
    core.run()
    built.resources.close()
    line.send(device.steps())


def _served(line: Connection, endpoint: str) -> None:
    """A whole engine, until the other side says so."""
    import os
    import signal
    import threading

    from sessionkv.actor import serve

    devices: list[_Device] = []

    def build(config: EngineConfig, **arguments: Any) -> Any:
        built, device = _build(config, **arguments)
        devices.append(device)
        return built

    def stop_when_told() -> None:
        line.recv()
        os.kill(os.getpid(), signal.SIGTERM)

    serve.build_engine = build
    threading.Thread(target=stop_when_told, daemon=True).start()
    serve.run_serve(CHECKSUM_CONFIG, endpoint, on_ready=lambda info: line.send(info))
    line.send(devices[0].steps())


def _load(endpoint: str, *, stream: bool) -> None:
    with Client(endpoint) as client, ThreadPoolExecutor(SEQUENCES) as pool:

        def one(number: int) -> None:
            arguments = {"tokens": [number, 1], "sampling": exactly(GENERATED)}
            if stream:
                for _ in client.stream_generate(**arguments):
                    pass
            else:
                client.generate(**arguments)

        list(pool.map(one, range(SEQUENCES)))


def _run(kind: str) -> _Steps:
    context = multiprocessing.get_context("spawn")
    line, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="skv-", dir="/tmp") as folder:
        endpoint = f"ipc://{folder}/e.sock"
        if kind == "alone":
            process = context.Process(target=_alone, args=(theirs,))
        else:
            process = context.Process(target=_served, args=(theirs, endpoint))
        process.start()
        theirs.close()
        try:
            if kind != "alone":
                line.recv()
                loader = context.Process(
                    target=_load, args=(endpoint,), kwargs={"stream": kind == "streams"}
                )
                loader.start()
                loader.join()
                line.send("stop")
            steps: _Steps = line.recv()
        finally:
            with suppress(OSError):
                line.close()
            process.join(30)
            process.kill()
    return steps


def measure(options: Options) -> list[Row]:
    """A new engine for each sample, the three kinds in turn."""
    kinds = {"alone": "core alone", "text": "with text", "streams": "with text, streamed"}
    samples: dict[str, list[_Steps]] = {kind: [] for kind in kinds}
    for _ in range(options.repeats):
        for kind, taken in samples.items():
            taken.append(_run(kind))
    rows, p99 = [], {}
    for kind, name in kinds.items():
        for percent in (50, 99):
            times = [percentile(steps.intervals_ms, percent) for steps in samples[kind]]
            p99[kind] = median_row(f"p{percent} of a step, {name}", times, "ms")
            rows.append(p99[kind])
        core_us = [steps.core_us for steps in samples[kind]]
        rows.append(median_row(f"core thread for a token, {name}", core_us, "us"))
    for kind in ("text", "streams"):
        name = f"p99 of a step, {kinds[kind]} / alone"
        rows.append(ratio_row(name, p99[kind], p99["alone"], bound=("<=", 1.1)))
    return rows
