"""How long the device has nothing to do while core decodes: a trace of every kernel and copy.

Core and the runner as they are; the front, which only takes what core sends, is stood in for. The
trace itself costs time at each launch, so what it shows is an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.keeping import KeepingFront
from benchmarks.report import Row
from sessionkv import CacheConfig, EngineConfig, SamplingParams
from sessionkv.engine.build import build_engine
from sessionkv.engine.core import Core
from sessionkv.engine.messages import OpenSession, SubmitTurn
from sessionkv.types import StepPlan

BATCHES = (1, 256)
PROMPT = 256
SKIPPED, TRACED = 30, 200
"""Steps in which all sequences decode: before the trace begins, and in it."""
LIMIT = 0.03
_LONG_NS = 5_000
"""Kernels of one graph follow each other sooner."""

Span = tuple[int, int]


def measure(folder: Path, disk: Path) -> list[Row]:
    """One engine's core in this process, on its GPU.

    Args:
        folder: Of the model.
        disk: Folder for the store.
    """
    config = EngineConfig(
        model=str(folder),
        model_cache=folder.parent / "cache",
        store=disk / "gaps",
        max_model_len=4096,
        offline=True,
        log_level="warning",
        cache=CacheConfig(host_bytes=0, disk_bytes=0),
    )
    built = build_engine(config)
    try:
        runner = _TracedRunner(built.parts.runner)
        front = _Front(runner)
        core = Core(replace(built.parts, runner=runner), built.inbox, front)
        front.begin(core.inbox)
        core.run()
    finally:
        built.resources.close()
    return [row for batch, spans in runner.traces.items() for row in rows_of(batch, spans)]


def rows_of(batch: int, spans: list[Span]) -> Iterator[Row]:
    """Shares of the time between the first and the last of some kernels, in nanoseconds."""
    gaps, length = gaps_of(spans)
    name = f"{TRACED} steps of {batch}"
    bound = ("<=", LIMIT)
    yield Row(f"{name}: with nothing on the device", sum(gaps) / length, "x", TRACED, bound)
    long = sum(gap for gap in gaps if gap > _LONG_NS)
    yield Row(f"{name}: of it in gaps of over {_LONG_NS // 1000} us", long / length, "x", TRACED)
    yield Row(f"{name}: a step", length / TRACED / 1e6, "ms", TRACED)


def gaps_of(spans: list[Span]) -> tuple[list[int], int]:
    """Lengths of the times that no span covers, and of the whole from the first to the last.

    Args:
        spans: Begin and end of each, in any order, overlapping as they like.
    """
    spans = sorted(spans)
    first = end = spans[0][0]
    gaps = []
    for begin, stop in spans:
        if begin > end:
            gaps.append(begin - end)
        end = max(end, stop)
    return gaps, end - first


class _TracedRunner:
    """Passes everything on; traces some steps of each batch that only decode.

    Attributes:
        traces: By number of sequences, begin and end of what the device did.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._profiler: Any = None
        self._seen = 0
        self.batch = 0
        self.traces: dict[int, list[Span]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> Any:
        if len(plan.steps) == plan.num_tokens == self.batch:
            self._seen += 1
            if self._seen == SKIPPED:
                self._profiler = torch.profiler.profile(
                    activities=[torch.profiler.ProfilerActivity.CUDA]
                )
                self._profiler.start()
            elif self._seen == SKIPPED + TRACED:
                torch.cuda.synchronize()
                self._profiler.stop()
                self.traces[self.batch] = list(_spans(self._profiler))
        return self._runner.launch(plan)

    def next_batch(self, batch: int) -> None:
        self.batch, self._seen = batch, 0


def _spans(profiler: Any) -> Iterator[Span]:
    on_device = torch.autograd.DeviceType.CUDA
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == on_device:
            yield event.start_ns(), event.start_ns() + event.duration_ns()


class _Front(KeepingFront):
    """Keeps every turn; asks for the next batch when all of one are durable."""

    def __init__(self, runner: _TracedRunner) -> None:
        super().__init__(turns=0)
        self._runner = runner
        self._batches = list(BATCHES)
        self._next_id = 0

    def begin(self, inbox: Any) -> None:
        self.inbox = inbox
        self.all_durable()

    def all_durable(self) -> None:
        if not self._batches:
            super().all_durable()
            return
        self.turns_left = self._batches.pop(0)
        self._runner.next_batch(self.turns_left)
        count = SKIPPED + TRACED + 200  # those that begin last are many steps behind
        for _ in range(self.turns_left):
            number = self._next_id = self._next_id + 1
            name = f"s{number}"
            self.inbox.put(OpenSession(number, "local", name, None, None, b"", None))
            tokens = [(number * 7919 + i * 31) % 5000 for i in range(PROMPT)]
            sampling = SamplingParams(
                temperature=0.6, max_tokens=count, ignore_eos=True, seed=number
            )
            self.inbox.put(
                SubmitTurn(number, "local", name, tokens, 0, b"", b"", sampling, frozenset())
            )
