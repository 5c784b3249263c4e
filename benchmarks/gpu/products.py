"""Products of few rows on a CUDA device, in the shapes of models of 8B and 0.6B.

Set against torch and a device copy of the same run: a product of few rows has to read its weight,
nothing else takes long. Weights are used by turns, so that none stays in the cache. Run with
``python -m benchmarks.gpu.products``: every tile that is tried is printed; takes under a minute.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from triton.errors import TritonError

from benchmarks.gpu.pointwise import graph_seconds
from benchmarks.gpu.pointwise_inputs import DEVICE, randn
from benchmarks.report import Options, Row, as_table
from sessionkv.kernels.silu_mul import silu_mul
from sessionkv.kernels.skinny_linear import (
    MAX_ROWS,
    ProductTile,
    choose_tile,
    skinny_gated_linear,
    skinny_linear,
)

ABOUT = "products of few rows on the device, against torch and a copy"
ROWS = (1, 2, 4, 8, 16, 32, 64)
TOUCHED_BYTES = 512 * 2**20
"""Of the weights used by turns; several times the largest cache."""
TRY_SECONDS = 35.0
"""After this long only what is chosen is still measured."""
FAILURES = (RuntimeError, TritonError, ValueError)


@dataclass(frozen=True)
class Shape:
    """A product of a layer; of a gated one, ``columns`` are those of the result."""

    name: str
    columns: int
    width: int
    is_gated: bool = False

    @property
    def weight_rows(self) -> int:
        return 2 * self.columns if self.is_gated else self.columns

    @property
    def nbytes(self) -> int:
        return self.weight_rows * self.width * 2


SHAPES = (
    Shape("8B qkv", 6144, 4096),
    Shape("8B o", 4096, 4096),
    Shape("8B gate, up", 12_288, 4096, is_gated=True),
    Shape("8B down", 4096, 12_288),
    Shape("8B output", 151_936, 4096),
    Shape("0.6B qkv", 4096, 1024),
    Shape("0.6B o", 1024, 2048),
    Shape("0.6B gate, up", 3072, 1024, is_gated=True),
    Shape("0.6B down", 1024, 3072),
    Shape("0.6B output", 151_936, 1024),
)
LAYERS = {"8B": 36, "0.6B": 28}


def tiles(rows: int, shape: Shape) -> Iterator[ProductTile]:
    """Those tried beside the one that is chosen."""
    if rows == 1:
        for columns, depth, warps in (
            (2, 1024, 4), (4, 1024, 4), (8, 1024, 4), (16, 512, 4), (4, 2048, 8), (8, 2048, 8),
            (16, 1024, 8), (8, 512, 4), (2, 2048, 4), (1, 2048, 4),
        ):  # fmt: skip
            if depth <= shape.width:
                yield ProductTile(columns, depth, warps, 1)
        return
    for columns, depth, warps, stages in (
        (16, 256, 4, 4), (16, 128, 4, 6), (16, 512, 4, 3), (32, 128, 4, 5), (32, 256, 4, 4),
        (32, 256, 8, 3), (64, 128, 4, 4), (64, 128, 8, 5), (16, 256, 2, 5),
    ):  # fmt: skip
        if depth <= shape.width:
            yield ProductTile(columns, depth, warps, stages)


class Product:
    """One shape with weights enough for many turns."""

    def __init__(self, shape: Shape, repeats: int) -> None:
        self.shape, self._repeats = shape, repeats
        count = max(2, min(64, TOUCHED_BYTES // shape.nbytes))
        self._weights = [
            randn(shape.weight_rows, shape.width).div_(shape.width**0.5) for _ in range(count)
        ]

    def torchs(self, x: torch.Tensor) -> float:
        """Seconds of torch's product, and of the gate after it."""

        def action(weight: torch.Tensor) -> Callable[[], object]:
            if self.shape.is_gated:
                return lambda: silu_mul(torch.nn.functional.linear(x, weight))
            return lambda: torch.nn.functional.linear(x, weight)

        return graph_seconds([action(weight) for weight in self._weights], self._repeats)

    def ours(self, x: torch.Tensor, tile: ProductTile | None) -> float:
        """Seconds of the kernel; infinite where it fails or is wrong."""
        product = skinny_gated_linear if self.shape.is_gated else skinny_linear

        def action(weight: torch.Tensor) -> Callable[[], object]:
            return lambda: product(x, weight, tile=tile)

        try:
            if self._error(x, product(x, self._weights[0], tile=tile)) > 1e-2:
                return float("inf")
            return graph_seconds([action(weight) for weight in self._weights], self._repeats)
        except FAILURES:
            return float("inf")

    def _error(self, x: torch.Tensor, found: torch.Tensor) -> float:
        wanted = x.float() @ self._weights[0].float().T
        if self.shape.is_gated:
            gate, up = wanted.chunk(2, 1)
            wanted = torch.nn.functional.silu(gate) * up
        error = float((found.float() - wanted).norm() / wanted.norm())
        return error if error == error else float("inf")


def copy_rate(repeats: int) -> float:
    """GB/s of a device copy, read and written."""
    source = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_seconds([lambda: target.copy_(source)], repeats) / 1e9


def measure_shape(shape: Shape, repeats: int, deadline: float) -> list[tuple[int, float, float]]:
    """Rows, torch's seconds and ours; prints every tile."""
    product, found = Product(shape, repeats), []
    gigabytes = shape.nbytes / 1e9
    for rows in ROWS:
        x = randn(rows, shape.width)
        library = product.torchs(x)
        label = f"{shape.name} {shape.weight_rows}x{shape.width}, {rows} rows"
        print(
            f"  {label:40} torch {library * 1e6:8.1f} us {gigabytes / library:7,.0f} GB/s", end=""
        )
        if rows > MAX_ROWS:
            print(flush=True)
            found.append((rows, library, library))
            continue
        chosen = product.ours(x, None)
        print(f"   chosen {chosen * 1e6:8.1f} us {gigabytes / chosen:7,.0f} GB/s", flush=True)
        used = choose_tile(rows, shape.columns, shape.width, gated=shape.is_gated)
        tried: list[tuple[float, ProductTile]] = [(chosen, used)]
        if rows in (1, 2, 16):  # between, the same tiles do as well
            for tile in tiles(rows, shape):
                if time.monotonic() < deadline:
                    tried.append((product.ours(x, tile), tile))
        for seconds, tile in sorted(tried, key=lambda pair: pair[0])[:4]:
            print(f"    {seconds * 1e6:8.1f} us {gigabytes / seconds:7,.0f} GB/s  {tile}")
        found.append((rows, library, chosen))
    return found


def measure(options: Options) -> list[Row]:
    """Print every tile; return, for each number of rows, all products of a step."""
    torch.manual_seed(0)
    deadline, repeats = time.monotonic() + TRY_SECONDS, options.repeats
    copied = copy_rate(repeats)
    figures = [Row("device copy", copied, "GB/s", repeats)]
    steps: dict[tuple[str, int], list[float]] = {}
    for shape in SHAPES:
        model = shape.name.split()[0]
        times = 1 if shape.name.endswith("output") else LAYERS[model]
        for rows, library, chosen in measure_shape(shape, repeats, deadline):
            sums = steps.setdefault((model, rows), [0.0, 0.0, 0.0])
            for place, amount in enumerate((library, chosen, shape.nbytes / 1e9 / copied)):
                sums[place] += times * amount
    for (model, rows), (library, chosen, floor) in steps.items():
        label = f"products of a step, {model}, {rows} rows"
        figures.append(Row(f"{label}: torch", library * 1e3, "ms", repeats))
        figures.append(Row(label, chosen * 1e3, "ms", repeats))
        figures.append(Row(f"{label}: copy / kernel", floor / chosen, "x", repeats))
    return figures


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.products", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(as_table(measure(Options(repeats=args.repeats))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
