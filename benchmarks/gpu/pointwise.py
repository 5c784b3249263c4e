"""Everything of a step on a CUDA device but products and attention, in the shape of an 8B model.

Each kernel is set against a device copy that moves as many bytes, copies of blocks against a plain
copy of pinned memory. Run with ``python -m benchmarks.gpu.pointwise``; ``--check`` compares with
the references instead and exits with 1 when anything is off. Either takes less than a minute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.pointwise_check import check
from benchmarks.gpu.pointwise_inputs import (
    DEVICE,
    DIM,
    EPS,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    VOCAB,
    make_logits,
    make_pool,
    make_rows,
    randn,
    rotation_arguments,
)  # fmt: skip
from benchmarks.report import Options, Row, as_table
from sessionkv.kernels.block_copies import gather_blocks, scatter_blocks
from sessionkv.kernels.fused_norm import add_rms_norm
from sessionkv.kernels.logit_changes import penalise
from sessionkv.kernels.logprobs import log_probabilities
from sessionkv.kernels.rotary_store import rotate_and_store
from sessionkv.kernels.sampling import SamplingRows, sample_tokens
from sessionkv.kernels.silu_mul import silu_mul

ABOUT = "norms, gate, rotation, sampling and block copies on the device, against plain copies"
STEP_ROWS = (1, 64, 256, 2048, 8192)
SAMPLE_ROWS = (1, 64, 256)
MOVED_BLOCKS = 192
L2_BYTES = 256 * 2**20
"""Buffers are changed in turns until so much was touched: nothing large stays in the cache."""

Action = Callable[[], object]


def graph_seconds(actions: Sequence[Action], repeats: int) -> float:
    """Median time of one action: all of them in a graph that is replayed."""
    actions[0]()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for action in actions:
            action()
    graph.replay()
    return event_seconds(graph.replay, repeats) / len(actions)


def event_seconds(action: Action, repeats: int) -> float:
    """Median time of an action on the current stream."""
    samples = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        action()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1e3)
    return statistics.median(samples)


def turns(nbytes: int) -> int:
    """How many buffers to use by turns, and actions of a graph."""
    return max(2, min(32, L2_BYTES // nbytes))


@dataclass(frozen=True)
class Case:
    """What is measured: ``make`` gives one action with buffers of its own."""

    name: str
    nbytes: int
    make: Callable[[], Action]


def step_cases(rows: int, pool: torch.Tensor) -> Iterator[Case]:
    """The pointwise kernels of one layer."""
    weight, head_weight = randn(HIDDEN), randn(DIM)

    def norm() -> Action:
        x, residual = randn(rows, HIDDEN), randn(rows, HIDDEN)
        return lambda: add_rms_norm(x, residual, weight, EPS)

    def gate() -> Action:
        gate_up = randn(rows, 2 * INTERMEDIATE)
        return lambda: silu_mul(gate_up)

    def rotation() -> Action:
        arguments = rotation_arguments(rows, pool)
        qkv = arguments.pop("qkv")
        return lambda: rotate_and_store(
            qkv, **arguments, q_norm=head_weight, k_norm=head_weight, eps=EPS, pool=pool, layer=7
        )

    yield Case(f"add_rms_norm, {rows:,} rows", rows * HIDDEN * 2 * 4, norm)
    yield Case(f"silu_mul, {rows:,} rows", rows * INTERMEDIATE * 2 * 3, gate)
    heads = HEADS + 2 * KV_HEADS
    yield Case(f"rotate_and_store, {rows:,} rows", rows * heads * DIM * 2 * 2, rotation)


def sampling_cases(rows: int) -> Iterator[Case]:
    """One read of bf16 logits is what a choice needs."""
    kinds = {
        "greedy": (make_rows(rows, 0.0), False),
        "temperature": (make_rows(rows, 0.8), False),
        "top-k 20, top-p 0.95": (make_rows(rows, 0.7, top_k=20, top_p=0.95), False),
        "top-p 0.9": (make_rows(rows, 0.8, top_p=0.9), False),
        "min-p 0.05": (make_rows(rows, 1.0, min_p=0.05), False),
        "top-p 0.9, flat": (make_rows(rows, 1.0, top_p=0.9), True),
    }
    for name, (parameters, is_flat) in kinds.items():

        def choose(parameters: SamplingRows = parameters, is_flat: bool = is_flat) -> Action:
            logits = make_logits(rows, is_flat=is_flat)
            return lambda: sample_tokens(logits, parameters)

        yield Case(f"{name}, {rows} rows", rows * VOCAB * 2, choose)

    def penalties() -> Action:
        logits = randn(rows, VOCAB, dtype=torch.float32)
        history = torch.randint(30, (rows, VOCAB), device=DEVICE, dtype=torch.int32) // 29
        order = torch.arange(rows, device=DEVICE, dtype=torch.int32)
        some = torch.full((rows,), 1.1, device=DEVICE)
        return lambda: penalise(
            logits, history, history_rows=order, repetition=some, presence=some, frequency=some
        )

    def logprobs() -> Action:
        logits, chosen = make_logits(rows), torch.zeros(rows, dtype=torch.int64, device=DEVICE)
        return lambda: log_probabilities(logits, chosen, 5)

    yield Case(f"penalties, {rows} rows", rows * VOCAB * 8, penalties)
    if rows <= 64:
        yield Case(f"log-probabilities, {rows} rows", rows * VOCAB * 2, logprobs)


def measure_case(case: Case, repeats: int) -> list[Row]:
    """Time of one call, and what a copy of as many bytes takes of it."""
    count = turns(case.nbytes)
    seconds = graph_seconds([case.make() for _ in range(count)], repeats)
    half = max(1, case.nbytes // 2)
    pairs = [
        [torch.empty(half, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
        for _ in range(count)
    ]
    copied = graph_seconds([lambda p=p: p[1].copy_(p[0]) for p in pairs], repeats)
    rate = case.nbytes / seconds / 1e9
    print(f"  {case.name:32} {seconds * 1e6:9.1f} us {rate:8,.0f} GB/s", end="")
    print(f"   copy {copied * 1e6:9.1f} us {case.nbytes / copied / 1e9:8,.0f} GB/s", flush=True)
    return [
        Row(case.name, seconds * 1e6, "us", repeats),
        Row(f"{case.name}: copy / kernel", copied / seconds, "x", repeats),
    ]


def measure_moves(pool: torch.Tensor, repeats: int) -> list[Row]:
    """Whole scattered blocks to and from pinned memory, by several numbers of programs."""
    ids = torch.randperm(pool.shape[0], device=DEVICE)[:MOVED_BLOCKS]
    host = torch.empty((MOVED_BLOCKS, *pool.shape[1:]), dtype=pool.dtype, pin_memory=True)
    plain = pool[:MOVED_BLOCKS]
    gigabytes = host.nbytes / 1e9
    out = gigabytes / event_seconds(lambda: host.copy_(plain, non_blocking=True), repeats)
    into = gigabytes / event_seconds(lambda: plain.copy_(host, non_blocking=True), repeats)
    rows = [
        Row("pinned copy out", out, "GB/s", repeats),
        Row("pinned copy in", into, "GB/s", repeats),
    ]
    for programs in (4, 8, 16):
        for name, move, best in (("gather", gather_blocks, out), ("scatter", scatter_blocks, into)):

            def act(move: Callable[..., None] = move, programs: int = programs) -> None:
                move(pool, ids, host, programs=programs)

            act()
            rate = gigabytes / event_seconds(act, repeats)
            label = f"{name} by {programs}"
            bound = (">=", 0.9) if programs == 8 else None
            rows.append(Row(label, rate, "GB/s", repeats))
            rows.append(Row(f"{label} / pinned copy", rate / best, "x", repeats, bound))
    return rows


def measure(options: Options) -> list[Row]:
    """Print every case, return all figures."""
    torch.manual_seed(0)
    pool = make_pool(1024)
    rows: list[Row] = []
    for count in STEP_ROWS:
        for case in step_cases(count, pool):
            rows += measure_case(case, options.repeats)
    for count in SAMPLE_ROWS:
        for case in sampling_cases(count):
            rows += measure_case(case, options.repeats)
    return rows + measure_moves(pool, options.repeats)


def main() -> int:
    """Measure, or check."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.pointwise", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the references instead")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    if args.check:
        return 0 if check() else 1
    rows = measure(Options(repeats=args.repeats))
    print(as_table(rows))
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
