"""Attention over paged blocks on a CUDA device, layer after layer, in the shape of an 8B model.

Decoding is set against a device copy of the same run, prefill against torch's own attention over
contiguous keys. Run with ``python -m benchmarks.gpu.attention``: every configuration is printed as
it is tried, those that the kernels choose by themselves first; ``--check`` compares with the
reference instead and exits with 1 when anything is off.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from triton.errors import TritonError

from benchmarks.report import Options, Row, as_table
from sessionkv.kernels.attention_launch import Tile
from sessionkv.kernels.attention_parts import gather_kv_layer, merge_attention
from sessionkv.kernels.paged_decode import decode_work, paged_decode
from sessionkv.kernels.paged_prefill import paged_prefill
from sessionkv.kernels.reference import ragged_attention
from sessionkv.model.divided_prefill import FusedSizes
from sessionkv.model.fused_prefill import cudnn_attention
from sessionkv.model.gpu_attention import GpuAttention
from sessionkv.model.gpu_batch import GpuBatch, PrefillRows

ABOUT = "attention on the device: decoding in GB/s of keys and values, prefill in TFLOP/s"
HEADS, KV_HEADS, DIM, BLOCK, LAYERS = 32, 8, 128, 16, 36
CELL_BYTES = KV_HEADS * DIM * 2 * 2
MIXED = (32768, *(256 + 61 * i for i in range(63)))  # one long conversation among short ones
DECODE = {
    "1 x 32k": (32768,),
    "8 x 8k": (8192,) * 8,
    "64 x 2k": (2048,) * 64,
    "256 x 1k": (1024,) * 256,
    "256 x 2k": (2048,) * 256,
    "64 mixed": MIXED,
}
BOUNDS = {"1 x 32k": 0.80, "64 x 2k": 0.95, "256 x 1k": 0.95}
DECODE_TILES = (
    Tile(16, 64, 4, 4), Tile(16, 128, 4, 3), Tile(16, 32, 4, 4), Tile(16, 64, 2, 3),
    Tile(16, 128, 8, 3),
)  # fmt: skip
PREFILL = ((2048, 2048), (8192, 8192), (8192, 32768), (512, 8192), (64, 8192), (64, 32768))
PREFILL_TILES = (
    Tile(128, 64, 8, 4), Tile(128, 128, 8, 2), Tile(128, 128, 8, 3), Tile(64, 64, 4, 3),
)  # fmt: skip
TRY_SECONDS = 70.0
"""After this long only what the kernels choose by themselves is still measured."""
FAILURES = (RuntimeError, TritonError)


@dataclass(frozen=True)
class Bench:
    """What all measurements share: the pool, and when trying other configurations ends."""

    pool: torch.Tensor
    repeats: int
    deadline: float

    def tries(self) -> bool:
        return time.monotonic() < self.deadline

    def batch(self, lengths: Sequence[int]) -> dict[str, torch.Tensor]:
        """Random tables of different blocks."""
        widths = [-(-length // BLOCK) for length in lengths]
        order = torch.randperm(self.pool.shape[0], device="cuda")[: sum(widths)]
        tables = torch.zeros((len(lengths), max(widths)), dtype=torch.int32, device="cuda")
        for row, part in enumerate(order.split(widths)):
            tables[row, : len(part)] = part
        lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        return {"block_tables": tables, "seq_lens": lens}

    def seconds(self, actions: Sequence[Callable[[], object]]) -> float:
        """Median time of one action: all of them in a graph that is replayed."""
        actions[0]()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for action in actions:
                action()
        graph.replay()
        samples = []
        for _ in range(self.repeats):
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) / 1e3)
        return statistics.median(samples) / len(actions)

    def attempt(
        self, label: str, actions: Sequence[Callable[[], object]], work: float, unit: str
    ) -> float:
        """Measure and print; 0 where it fails. ``work`` is in the unit times seconds."""
        try:
            seconds = self.seconds(actions)
        except FAILURES as error:
            print(f"  {label:46} failed: {type(error).__name__}: {str(error)[:100]!r}", flush=True)
            return 0.0
        print(f"  {label:46} {work / seconds:9,.1f} {unit:8} {seconds * 1e6:9,.1f} us", flush=True)
        return work / seconds


def make_pool(num_blocks: int, *, layers: int = LAYERS) -> torch.Tensor:
    """Random keys and values, as many blocks as there is room for."""
    shape = (layers, 2, KV_HEADS, BLOCK, DIM)
    block_bytes = 2 * torch.Size(shape).numel()
    num_blocks = min(num_blocks, int(0.9 * torch.cuda.mem_get_info()[0]) // block_bytes)
    pool = torch.empty((num_blocks, *shape), dtype=torch.bfloat16, device="cuda")
    for part in pool.split(512):
        part.normal_()
    return pool


def copy_rate(bench: Bench) -> float:
    """GB/s of a device copy, read and written."""
    source = bench.pool.view(-1)[: 2**30]
    target = torch.empty_like(source)
    return bench.attempt("copy", [lambda: target.copy_(source)], 2 * source.nbytes / 1e9, "GB/s")


def measure_decode(bench: Bench, name: str, lengths: Sequence[int]) -> float:
    """GB/s of what the kernels choose by themselves; others are printed."""
    batch = bench.batch(lengths)
    queries = torch.randn(len(lengths), HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(queries)

    def run(tile: Tile | None, num_splits: int | None, layer: int) -> Callable[[], object]:
        return lambda: paged_decode(
            queries, bench.pool, layer, **batch, max_seq_len=max(lengths), out=out, tile=tile,
            num_splits=num_splits,
        )  # fmt: skip

    gigabytes = sum(lengths) * CELL_BYTES / 1e9

    def attempt(label: str, tile: Tile | None, num_splits: int | None) -> float:
        actions = [run(tile, num_splits, layer) for layer in range(LAYERS)]
        return bench.attempt(label, actions, gigabytes, "GB/s")

    def layers() -> None:
        """As a step does it: the work is divided once for all layers."""
        arguments = {**batch, "max_seq_len": max(lengths)}
        work = decode_work(queries, bench.pool, **arguments)
        for layer in range(LAYERS):
            paged_decode(queries, bench.pool, layer, **arguments, work=work, out=out)

    chosen = bench.attempt(f"decode {name}", [layers], gigabytes * LAYERS, "GB/s")
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    for tile in (None, *DECODE_TILES):
        splits = {max(1, min(128, n * sms // (len(lengths) * KV_HEADS))) for n in (2, 4, 8)}
        for num_splits in sorted(splits):
            if bench.tries():
                attempt(f"decode {name}, {shown(tile)}, {num_splits} splits", tile, num_splits)
    return chosen


def shown(tile: Tile | None) -> str:
    if tile is None:
        return "chosen"
    return f"{tile.rows}x{tile.positions} w{tile.num_warps} s{tile.num_stages}"


def causal_flops(num_new: int, length: int) -> float:
    return 4 * HEADS * DIM * (num_new * length - num_new * (num_new - 1) / 2)


def measure_prefill(bench: Bench, num_new: int, length: int) -> float:
    """TFLOP/s of a model's layer; the paged kernel alone and torch's ways are printed."""
    name = f"{num_new:,} of {length:,}"
    work = causal_flops(num_new, length) / 1e12
    batch = bench.batch([length])
    batch["query_starts"] = torch.tensor([0, num_new], dtype=torch.int32, device="cuda")
    queries = torch.randn(num_new, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(queries)

    def attempt(label: str, tile: Tile | None, num_splits: int | None) -> float:
        def run(layer: int) -> Callable[[], object]:
            return lambda: paged_prefill(
                queries, bench.pool, layer, **batch, max_query_len=num_new, max_seq_len=length,
                out=out, tile=tile, num_splits=num_splits,
            )  # fmt: skip

        return bench.attempt(label, [run(layer) for layer in range(4)], work, "TFLOP/s")

    chosen = measure_model(bench, name, queries, batch, length)
    attempt(f"prefill {name}, paged kernel", None, None)
    for label, actions, counted in torch_ways(bench, queries, batch["block_tables"][0], length):
        unit = "GB/s" if label.startswith("gather of") else "TFLOP/s"
        bench.attempt(f"prefill {name}, {label}", actions, counted, unit)
    for tile in (None, *PREFILL_TILES):
        for num_splits in (1,) if num_new > 512 else (4, 8, 16):
            if bench.tries():
                attempt(f"prefill {name}, {shown(tile)}, {num_splits} splits", tile, num_splits)
    return chosen


def measure_model(
    bench: Bench, name: str, queries: torch.Tensor, batch: dict[str, torch.Tensor], length: int
) -> float:
    """TFLOP/s of a layer as a model computes it, whichever ways its rows go."""
    attention = GpuAttention(
        num_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, dtype=queries.dtype, device=queries.device
    )
    num_new, nothing = queries.shape[0], torch.empty(0)
    rows = PrefillRows(**batch, lengths=((num_new, length),))
    step = attention.begin(GpuBatch(nothing, nothing, nothing, None, rows), BLOCK)
    return bench.attempt(
        f"prefill {name}",
        [
            lambda layer=layer: attention.attend(queries, bench.pool, layer, step=step, window=None)
            for layer in range(4)
        ],
        causal_flops(num_new, length) / 1e12,
        "TFLOP/s",
    )


def measure_planning() -> None:
    """Print how long the library takes to plan a shape that it has not seen."""
    sizes = FusedSizes()
    shape = (KV_HEADS, sizes.pieces[0], DIM)
    most = max(sizes.rows, *sizes.squares)
    queries = torch.randn(most, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    keys = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    for rows, number, causal in (*sizes.calls(), *sizes.calls()):
        torch.cuda.synchronize()
        start = time.perf_counter()
        seen = keys[:, :number]
        cudnn_attention(queries[:rows], seen, seen, causal=causal)
        torch.cuda.synchronize()
        passed = (time.perf_counter() - start) * 1e3
        print(f"  {rows} rows over {number:,}, as it comes {passed:32.2f} ms", flush=True)


def torch_ways(
    bench: Bench, queries: torch.Tensor, table: torch.Tensor, length: int
) -> Iterator[tuple[str, list[Callable[[], object]], float]]:
    """Label, one action a layer, TFLOP that it computes; of the gather GB read and written."""
    num_new, scratch = queries.shape[0], []
    for layer in range(4):
        kv = torch.empty((2, KV_HEADS, length, DIM), dtype=torch.bfloat16, device="cuda")
        gather_kv_layer(bench.pool, layer, block_table=table, num_tokens=length, out=kv)
        scratch.append(kv)
    is_causal = num_new == length
    work = causal_flops(num_new, length) if is_causal else 4 * HEADS * DIM * num_new * length
    label = "causal" if is_causal else "full"
    for name, attention in (("flash", flash), ("cuDNN", cudnn)):
        yield (
            f"torch {name} {label}",
            [lambda kv=kv, a=attention: a(queries, kv, is_causal) for kv in scratch],
            work / 1e12,
        )
    gathers = [
        lambda layer=layer, kv=kv: gather_kv_layer(
            bench.pool, layer, block_table=table, num_tokens=length, out=kv
        )
        for layer, kv in enumerate(scratch)
    ]
    yield f"gather of {length:,}", gathers, scratch[0].nbytes * 2 / 1e9
    if not is_causal:
        yield (
            "gather, cuDNN in two parts, merge",
            [
                lambda layer=layer, kv=kv: in_two_parts(bench.pool, layer, queries, table, kv)
                for layer, kv in enumerate(scratch)
            ],
            causal_flops(num_new, length) / 1e12,
        )


def flash(
    queries: torch.Tensor, kv: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Result ``[tokens, heads, dim]`` and natural log-sums ``[tokens, heads]``."""
    out, logs, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        queries.transpose(0, 1)[None], kv[0][None], kv[1][None], 0.0, is_causal
    )
    return out[0].transpose(0, 1), logs.view(HEADS, -1).T


def cudnn(
    queries: torch.Tensor, kv: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`flash`."""
    out, logs, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries.transpose(0, 1)[None], kv[0][None], kv[1][None], None, True, 0.0, is_causal
    )
    return out[0].transpose(0, 1), logs.reshape(HEADS, -1).T


def in_two_parts(
    pool: torch.Tensor, layer: int, queries: torch.Tensor, table: torch.Tensor, kv: torch.Tensor
) -> torch.Tensor:
    """The prefix in full and the chunk causally, over gathered keys, merged."""
    length = kv.shape[2]
    gather_kv_layer(pool, layer, block_table=table, num_tokens=length, out=kv)
    prefix, chunk = kv.split([length - queries.shape[0], queries.shape[0]], 2)
    return merge_attention(*cudnn(queries, prefix, False), *cudnn(queries, chunk, True))


def measure(options: Options) -> list[Row]:
    """Print every configuration, return what models use."""
    deadline = time.monotonic() + TRY_SECONDS
    bench = Bench(make_pool(256 * 2048 // BLOCK), options.repeats, deadline)
    copied = copy_rate(bench)
    measure_planning()
    rows = [Row("device copy", copied, "GB/s", options.repeats)]
    for num_new, length in PREFILL:
        rate = measure_prefill(bench, num_new, length)
        rows.append(Row(f"prefill {num_new:,} of {length:,}", rate, "TFLOP/s", options.repeats))
    for name, lengths in DECODE.items():
        if sum(lengths) // BLOCK > bench.pool.shape[0]:
            print(f"  decode {name}: no room")
            continue
        rate = measure_decode(bench, name, lengths)
        rows.append(Row(f"decode {name}", rate, "GB/s", options.repeats))
        bound = (">=", BOUNDS[name]) if name in BOUNDS else None
        rows.append(Row(f"decode {name} / copy", rate / copied, "x", options.repeats, bound))
    return rows


def check() -> bool:
    """Compare with the reference; prints the relative error of each case."""
    torch.manual_seed(0)
    bench = Bench(make_pool(8192, layers=3), 1, 0.0)
    cases: list[tuple[str, list[tuple[int, int]], int | None]] = [
        ("one stream", [(1, 32768)], None),
        ("decode", [(1, 1 + 47 * i) for i in range(64)], None),
        ("decode, window", [(1, 1 + 47 * i) for i in range(64)], 512),
        ("fresh", [(2048, 2048)], None),
        ("few over many", [(64, 32768)], None),
        ("ragged", [(1, 900), (300, 300), (17, 4096), (1, 1), (512, 1024), (2, 77)], None),
        ("ragged, window", [(1, 900), (300, 300), (17, 4096), (512, 1024), (2, 77)], 100),
    ]
    worst = 0.0
    for name, lengths, window in cases:
        batch = bench.batch([length for _, length in lengths])
        counts = torch.tensor([0] + [new for new, _ in lengths])
        batch["query_starts"] = counts.cumsum(0).to("cuda", torch.int32)
        rows = int(counts.sum())
        queries = torch.randn(rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        wanted, wanted_logs = ragged_attention(queries, bench.pool, 1, **batch, window=window)
        longest = max(length for _, length in lengths)
        common = {"max_seq_len": longest, "window": window}
        for num_splits in (None, 1, 7):
            out = torch.full_like(queries, torch.nan)
            logs = torch.full(out.shape[:2], torch.nan, device="cuda")
            paged_prefill(
                queries, bench.pool, 1, **batch, **common, max_query_len=int(counts.max()),
                out=out, log_sums=logs, num_splits=num_splits,
            )  # fmt: skip
            error = relative(out, wanted)
            log_error = float((logs - wanted_logs).abs().max())
            print(f"{name:16} prefill splits {num_splits}: {error:.2e}, logs {log_error:.2e}")
            worst = max(worst, error, log_error)
            if rows == len(lengths):
                starts = batch.pop("query_starts")
                out = torch.full_like(queries, torch.nan)
                paged_decode(
                    queries, bench.pool, 1, **batch, **common, out=out, num_splits=num_splits
                )
                batch["query_starts"] = starts
                error = relative(out, wanted)
                print(f"{name:16} decode  splits {num_splits}: {error:.2e}")
                worst = max(worst, error)
    return max(worst, check_two_parts(bench)) < 1e-2


def check_two_parts(bench: Bench) -> float:
    """The error of torch's attention over gathered keys, merged."""
    batch = bench.batch([4000])
    queries = torch.randn(500, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    starts = torch.tensor([0, 500], dtype=torch.int32, device="cuda")
    wanted, _ = ragged_attention(queries, bench.pool, 1, **batch, query_starts=starts)
    kv = torch.full((2, KV_HEADS, 4000, DIM), torch.nan, device="cuda", dtype=torch.bfloat16)
    found = in_two_parts(bench.pool, 1, queries, batch["block_tables"][0], kv)
    error = relative(found, wanted)
    print(f"{'two parts':16} gathered and merged: {error:.2e}")
    return error


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative error; infinite for NaN."""
    error = float((found.double() - wanted).norm() / wanted.norm())
    return error if error == error else float("inf")


def main() -> int:
    """Measure, or check."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.attention", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the reference instead")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.check:
        return 0 if check() else 1
    rows = measure(Options(repeats=args.repeats))
    print(as_table(rows))
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
