"""The runner alone on a CUDA device: what a step takes of the device and of the host.

Random weights made on the device, so that nothing is read; plans as the scheduler would make them.
Run with ``python -m benchmarks.gpu.steps``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.report import Row, as_table, median_row
from sessionkv.engine.gpu.graphs import size_for
from sessionkv.engine.gpu.runner import GpuRunner
from sessionkv.model.gpu_decoder import GpuDecoder
from sessionkv.model.spec import ModelSpec, RopeSpec
from sessionkv.model.weights import LayerWeights
from sessionkv.types import SamplingParams, SequenceStart, SequenceStep, StepPlan

ABOUT = "a step of the runner: decoding and prefill by the clock, and the host's share"
BLOCK = 16
MAX_LEN = 40_960
COPY_GBPS = 4_230
DECODES = ((1, 1024), (1, 32_768), (8, 2048), (64, 2048), (256, 1024))
PREFILLS = ((64, 0), (2048, 0), (8192, 0), (64, 8192), (64, 32_704), (8192, 24_576))


def qwen3(layers: int, hidden: int, heads: int, inner: int, *, tied: bool) -> ModelSpec:
    """A shape of the family."""
    return ModelSpec(
        family="qwen3", num_layers=layers, hidden_size=hidden, num_heads=heads, num_kv_heads=8,
        head_dim=128, intermediate_size=inner, vocab_size=151_936, max_model_len=MAX_LEN,
        rms_eps=1e-6, tied_embeddings=tied, qk_norm=True, qkv_bias=False, o_bias=False,
        mlp_bias=False, windows=(None,) * layers, rope=RopeSpec("default", 1e6),
    )  # fmt: skip


SHAPES = {
    "8b": qwen3(36, 4096, 32, 12_288, tied=False),
    "0.6b": qwen3(28, 1024, 16, 3072, tied=True),
}


@dataclass
class RandomWeights:
    """As :class:`~sessionkv.model.weights.WeightFiles` gives them, made up."""

    spec: ModelSpec
    device: torch.device

    def _random(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(0, 0.02)

    def _ones(self, width: int) -> Tensor:
        return torch.ones(width, dtype=torch.bfloat16, device=self.device)

    def embedding(self) -> Tensor:
        return self._random(self.spec.vocab_size, self.spec.hidden_size)

    def final_norm(self) -> Tensor:
        return self._ones(self.spec.hidden_size)

    def output(self) -> Tensor | None:
        return None if self.spec.tied_embeddings else self.embedding()

    def layer(self, index: int) -> LayerWeights:
        del index
        spec = self.spec
        hidden, inner = spec.hidden_size, spec.intermediate_size
        return LayerWeights(
            input_norm=self._ones(hidden), qkv=self._random(spec.q_size + 2 * spec.kv_size, hidden),
            qkv_bias=None, q_norm=self._ones(spec.head_dim), k_norm=self._ones(spec.head_dim),
            o=self._random(hidden, spec.q_size), o_bias=None, post_norm=self._ones(hidden),
            gate_up=self._random(2 * inner, hidden), gate_up_bias=None,
            down=self._random(hidden, inner), down_bias=None,
        )  # fmt: skip


class Plans:
    """Sequences of one runner, driven without a scheduler."""

    def __init__(self, runner: GpuRunner) -> None:
        self.runner = runner
        self._steps = 0
        self._next_id = 0

    def begin(self, count: int, context: int, first_block: int) -> list[SequenceStart]:
        """Sequences whose history is held to be there, whatever the pool has; blocks spread."""
        per_seq = -(-(context + 128) // BLOCK)
        order = torch.randperm(count * per_seq, generator=torch.Generator().manual_seed(context))
        starts = []
        for number in range(count):
            self._next_id += 1
            part = order[number * per_seq : (number + 1) * per_seq] + first_block
            starts.append(
                SequenceStart(
                    self._next_id, tuple(part.tolist()), context, [1] * (context + 1), context + 1,
                    SamplingParams(temperature=0.6, seed=number), frozenset(),
                )
            )  # fmt: skip
        return starts

    def run(
        self, steps: Sequence[SequenceStep], starts: Sequence[SequenceStart] = ()
    ) -> dict[int, int]:
        self._steps += 1
        output = self.runner.execute(StepPlan(self._steps, tuple(starts), tuple(steps)))
        if output.failed:
            raise RuntimeError(f"failed: {output.failed}")
        return {seq_id: token.token_id for seq_id, token in output.sampled.items()}

    def end(self, starts: Sequence[SequenceStart]) -> None:
        self._steps += 1
        ends = tuple(start.seq_id for start in starts)
        self.runner.execute(StepPlan(self._steps, ends=ends))


def decode(plans: Plans, count: int, context: int, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of each step, and of them what the device did not take."""
    starts = plans.begin(count, context, 1)
    last = {start.seq_id: 5 for start in starts}
    took, host = [], []
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for turn in range(repeats + 3):
        steps = [
            SequenceStep(seq_id, context + turn, (token,), (), sample=True)
            for seq_id, token in last.items()
        ]
        begun = time.perf_counter()
        last = plans.run(steps, starts if turn == 0 else ())
        took.append(time.perf_counter() - begun)
    size = size_for(plans.runner.graphs.sizes, count)
    for _ in range(5):
        events[0].record()
        plans.runner.graphs.run(size)
        events[1].record()
        torch.cuda.synchronize()
        host.append(events[0].elapsed_time(events[1]) / 1e3)
    plans.end(starts)
    return took[3:], host


def prefill(plans: Plans, new: int, context: int, repeats: int) -> list[float]:
    """Seconds of a step of so many new tokens of one sequence."""
    took = []
    for turn in range(repeats + 2):
        starts = plans.begin(1, context + new, 1 + turn)
        step = SequenceStep(starts[0].seq_id, context, [1] * new, (), sample=True)
        begun = time.perf_counter()
        plans.run([step], starts)
        took.append(time.perf_counter() - begun)
        plans.end(starts)
    return took[2:]


def measure(shape: str, repeats: int) -> Iterator[Row]:
    """All cases of one shape."""
    device = torch.device("cuda", 0)
    spec = SHAPES[shape]
    begun = time.perf_counter()
    decoder = GpuDecoder(spec, RandomWeights(spec, device), max_model_len=MAX_LEN)
    torch.cuda.synchronize()
    yield Row(f"{shape}: weights", time.perf_counter() - begun, "s", 1)
    begun = time.perf_counter()
    runner = GpuRunner(
        decoder, fingerprint="", geometry=spec.kv_geometry(BLOCK, "bfloat16"), num_blocks=26_000,
        max_model_len=MAX_LEN, max_step_tokens=8192, max_running=256, device=device,
    )  # fmt: skip
    for start in range(0, 26_000, 1000):
        runner.pool[start : start + 1000].normal_(0, 1)
    runner.warm_up(lambda done, total: None)
    yield Row(f"{shape}: pool and graphs", time.perf_counter() - begun, "s", 1)
    plans = Plans(runner)
    for count, context in DECODES:
        took, device_s = decode(plans, count, context, repeats)
        name = f"{shape}: decode {count} x {context:,}"
        step_s, graph_s = statistics.median(took), statistics.median(device_s)
        kv_bytes = count * context * runner.geometry.token_bytes
        floor_s = (decoder.weights_bytes + kv_bytes) / COPY_GBPS / 1e9
        yield median_row(name, [count / s for s in took], "tok/s")
        yield Row(f"{name}: step", 1e3 * step_s, "ms", len(took))
        yield Row(f"{name}: of it on the device", 1e3 * graph_s, "ms", len(device_s))
        yield Row(f"{name}: device over floor", graph_s / floor_s, "x", len(device_s))
    for new, context in PREFILLS:
        took = prefill(plans, new, context, max(3, repeats // 10))
        yield median_row(f"{shape}: {new:,} after {context:,}", [1e3 * s for s in took], "ms")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.steps", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    for shape in args.shape:
        rows = []
        for row in measure(shape, args.repeats):
            print(f"  {row.name:<40}{row.value:>12,.3f} {row.unit}", flush=True)
            rows.append(row)
        print(as_table(rows))


if __name__ == "__main__":
    main()
