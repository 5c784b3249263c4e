"""Matrix products of few rows with a weight, on the GPU, bound by reading the weight once.

A program computes a few columns of the result from whole rows of the weight. One row is multiplied
and summed without tensor cores, whose tile it would fill to a sixteenth; 2 to 16 rows are one tile.
Sums are fp32, whatever is asked of torch, and one rounding follows: within one rounding of the
output's dtype plus 1e-5 of an exact result for inputs of order 1. Rows do not influence each other.

The gated product is that of the MLP: gate and up are in one program, so that what lies between
them and the next product costs no pass of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sessionkv.kernels.arguments import check_tensor
from sessionkv.kernels.early_launch import let_next_start, starts_early, wait_for_earlier

MAX_ROWS = 16
"""Rows of a tensor core's smallest tile; with more, a library's larger tiles are as fast."""
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class ProductTile:
    """What one program works on.

    Attributes:
        columns: Of the result; a power of 2, at least 16 for more than one row. A gated product
            reads twice as many rows of the weight.
        depth: Elements of these rows in a turn of the loop; a power of 2, at least 16.
        num_warps: Warps of the program.
        num_stages: Turns in flight, for more than one row.
    """

    columns: int
    depth: int
    num_warps: int
    num_stages: int


def choose_tile(num_rows: int, depth: int, *, gated: bool = False) -> ProductTile:
    """The tile for a product.

    Args:
        num_rows: 1 to :data:`MAX_ROWS`.
        depth: Elements of a row.
        gated: Whether each column takes two rows of the weight.
    """
    deepest = max(16, triton.next_power_of_2(depth))
    if num_rows == 1:
        # Measured on an H200 over the products of an 8B model: 3,660 to 4,630 GB/s.
        return (
            ProductTile(4, min(1024, deepest), 4, 1)
            if gated
            else (ProductTile(4, min(2048, deepest), 8, 1))
        )
    return ProductTile(32, min(128 if gated else 256, deepest), 4, 4)


@triton.jit
def _load_weight_tile(
    rows: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,
) -> tl.tensor:
    """Elements ``at`` of some rows of the weight."""
    if WHOLE:
        found = tl.load(rows + at[None, :])
    else:
        present = inside[:, None] & (at < WIDTH)[None, :]
        found = tl.load(rows + at[None, :], mask=present, other=0.0)
    return found.to(tl.float32)


@triton.jit
def _load_row(x: tl.tensor, at: tl.tensor, WIDTH: tl.constexpr, WHOLE: tl.constexpr) -> tl.tensor:
    """Elements ``at`` of the only row."""
    found = tl.load(x + at) if WHOLE else tl.load(x + at, mask=at < WIDTH, other=0.0)
    return found.to(tl.float32)[None, :]


@triton.jit
def _one_row(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_columns: tl.tensor,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    WHOLE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Some columns of the only row; ``WIDTH`` elements are summed.

    ``WHOLE``: no program has columns or turns past the end, and nothing is masked. What the first
    turn needs of the weight is asked for before the row is there.
    """
    let_next_start(EARLY)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_columns
    lane = tl.arange(0, DEPTH)
    rows = weight + column.to(tl.int64)[:, None] * WIDTH
    up_rows = rows + num_columns.to(tl.int64) * WIDTH
    acc = _load_weight_tile(rows, lane, inside, WIDTH, WHOLE)
    up_acc = acc
    if GATED:
        up_acc = _load_weight_tile(up_rows, lane, inside, WIDTH, WHOLE)
    wait_for_earlier(EARLY)
    row = _load_row(x, lane, WIDTH, WHOLE)
    acc *= row
    up_acc *= row
    for start in range(DEPTH, WIDTH, DEPTH):
        at = start + lane
        row = _load_row(x, at, WIDTH, WHOLE)
        acc += _load_weight_tile(rows, at, inside, WIDTH, WHOLE) * row
        if GATED:
            up_acc += _load_weight_tile(up_rows, at, inside, WIDTH, WHOLE) * row
    result = tl.sum(acc, 1)
    if bias is not None:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up_result = tl.sum(up_acc, 1)
        if bias is not None:
            up_bias = tl.load(bias + num_columns + column, mask=inside, other=0.0)
            up_result += up_bias.to(tl.float32)
        result = result / (1.0 + tl.exp(-result)) * up_result
    tl.store(out + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """Some columns of up to ``ROWS`` rows."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_columns
    lane = tl.arange(0, DEPTH)
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    columns = weight + column.to(tl.int64)[None, :] * WIDTH
    up_columns = columns + num_columns.to(tl.int64) * WIDTH
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    up_acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, WIDTH, DEPTH):
        at = start + lane
        in_width = at < WIDTH
        present = in_width[:, None] & inside[None, :]
        cells = is_row[:, None] & in_width[None, :]
        rows = tl.load(x + row[:, None] * WIDTH + at[None, :], mask=cells, other=0.0)
        acc = tl.dot(rows, tl.load(columns + at[:, None], mask=present, other=0.0), acc)
        if GATED:
            up = tl.load(up_columns + at[:, None], mask=present, other=0.0)
            up_acc = tl.dot(rows, up, up_acc)
    if bias is not None:
        acc += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if bias is not None:
            up_bias = tl.load(bias + num_columns + column, mask=inside, other=0.0)
            up_acc += up_bias.to(tl.float32)[None, :]
        acc = acc / (1.0 + tl.exp(-acc)) * up_acc
    to_out = out + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(to_out, acc.to(out.dtype.element_ty), mask=is_row[:, None] & inside[None, :])


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    tile: ProductTile | None = None,
) -> Tensor:
    """``x @ weight.T + bias`` of at most :data:`MAX_ROWS` rows.

    Args:
        x: ``[rows, width]``, contiguous, bf16 or fp16.
        weight: ``[columns, width]``, contiguous, like ``x``.
        bias: ``[columns]``, like ``x``, or None.
        out: Where to write the result; contiguous.
        tile: Instead of the one that fits the shapes.

    Returns:
        ``[rows, columns]`` in the dtype of ``x``, ``out`` if given.

    Raises:
        ValueError: An argument's shape, type, device or strides do not fit.
    """
    return _launch(x, weight, bias, out=out, tile=tile, gated=False)


def skinny_gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tile: ProductTile | None = None
) -> Tensor:
    """``silu(gate) * up`` of at most :data:`MAX_ROWS` rows, gate and up being one product.

    Neither is rounded before they are multiplied.

    Args:
        x: As for :func:`skinny_linear`.
        weight: ``[2 * columns, width]``: the gate's rows, then the others.
        bias: ``[2 * columns]`` or None.
        tile: As for :func:`skinny_linear`.

    Returns:
        ``[rows, columns]``, new, in the dtype of ``x``.

    Raises:
        ValueError: As for :func:`skinny_linear`.
    """
    if weight.shape[0] % 2:
        raise ValueError(f"weight has {weight.shape[0]} rows, which are not two halves")
    return _launch(x, weight, bias, out=None, tile=tile, gated=True)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    out: Tensor | None,
    tile: ProductTile | None,
    gated: bool,
) -> Tensor:
    check_tensor("x", x, (None, None), dtypes=HALVES, like=x)
    rows, width = x.shape
    check_tensor("weight", weight, (None, width), dtypes=(x.dtype,), like=x)
    if rows > MAX_ROWS:
        raise ValueError(f"x has {rows} rows, above {MAX_ROWS}")
    if bias is not None:
        check_tensor("bias", bias, weight.shape[:1], dtypes=(x.dtype,), like=x)
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    if out is None:
        out = x.new_empty((rows, columns))
    check_tensor("out", out, (rows, columns), dtypes=(x.dtype,), like=x)
    if not out.numel():
        return out
    if tile is None:
        tile = choose_tile(rows, width, gated=gated)
    grid = (triton.cdiv(columns, tile.columns),)
    if rows == 1:
        early = starts_early(x)
        _one_row[grid](
            x, weight, bias, out, columns, WIDTH=width, GATED=gated,
            WHOLE=columns % tile.columns == 0 and width % tile.depth == 0,
            COLUMNS=tile.columns, DEPTH=tile.depth, EARLY=early,
            num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=early,
        )  # fmt: skip
    else:
        _few_rows[grid](
            x, weight, bias, out, rows, columns, WIDTH=width, GATED=gated, ROWS=MAX_ROWS,
            COLUMNS=tile.columns, DEPTH=tile.depth,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out
