"""Long prefixes through another attention: read one layer's keys into contiguous memory, merge.

An attention that wants contiguous keys runs a prefix (all of it seen by every query) faster than
paged tiles do; its result and that of the chunk itself are two parts that
:func:`merge_attention` joins by their sums of exponentials. Both kernels only move memory. Knows
nothing of who computes the parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sessionkv.kernels.arguments import FLOAT32, INT32, check_tensor
from sessionkv.kernels.attention_arguments import check_pool, check_range, check_rows
from sessionkv.kernels.attention_launch import power_of_2

# Elements that a program copies: 16 KiB of 16-bit keys, enough loads in flight for full bandwidth.
_COPIED = 8192
# Elements of a result that a program merges: 32 fp32 registers a thread for each part.
_MERGED = 4096


def gather_kv_layer(
    pool: Tensor, layer: int, *, block_table: Tensor, num_tokens: int, out: Tensor
) -> None:
    """Copy the first positions of one sequence and layer into contiguous memory.

    Args:
        pool: ``[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]``, contiguous.
        layer: Index of the layer.
        block_table: ``[max_blocks]`` int32 on the pool's device; entries past ``num_tokens`` are
            not read.
        num_tokens: Positions to copy; 0 does nothing.
        out: ``[2, kv_heads, num_tokens, head_dim]``, the pool's type; each head contiguous, so it
            may be the front of longer scratch.

    Raises:
        ValueError: An argument's shape, type, device or strides do not fit.
    """
    check_pool(pool, layer)
    num_blocks, num_layers, _, kv_heads, block_size, head_dim = pool.shape
    check_tensor("block_table", block_table, (None,), dtypes=INT32, like=pool)
    room = block_table.shape[0] * block_size
    check_range("num_tokens", num_tokens, 0, room, why="the room of the block table")
    shape = torch.Size((2, kv_heads, num_tokens, head_dim))
    if out.shape != shape or out.stride()[2:] != (head_dim, 1):
        raise ValueError(
            f"out has shape {list(out.shape)} and strides {out.stride()}; needed are "
            f"{list(shape)} and (.., .., {head_dim}, 1)"
        )
    if out.dtype != pool.dtype or out.device != pool.device:
        raise ValueError(f"out is {out.dtype} on {out.device}, not {pool.dtype} on {pool.device}")
    if num_tokens == 0:
        return
    head = block_size * head_dim
    width = min(1024, head & -head)  # the longest power of 2 that divides a head's part of a block
    grid = (triton.cdiv(num_tokens * head_dim, _COPIED), kv_heads, 2)
    _gather[grid](
        pool, block_table, out, layer, num_tokens, num_blocks, out.stride(0), out.stride(1),
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, HEAD=head, ROWS=_COPIED // width, WIDTH=width,
        BLOCK_STRIDE=num_layers * 2 * kv_heads * head, num_warps=4,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["layer", "num_tokens", "num_blocks"],
    do_not_specialize_on_alignment=["block_table"],
)
def _gather(
    pool: tl.tensor,
    block_table: tl.tensor,
    out: tl.tensor,
    layer: tl.tensor,
    num_tokens: tl.tensor,
    num_blocks: tl.tensor,
    side_stride: tl.tensor,
    head_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Copy ``ROWS * WIDTH`` elements of one head's keys or values; a row lies within one block."""
    head = tl.program_id(1)
    side = tl.program_id(2)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)) * WIDTH  # elements from the first
    column = tl.arange(0, WIDTH)
    num_elements = num_tokens * HEAD_DIM
    present = row < num_elements
    block = tl.load(block_table + row // HEAD, mask=present, other=0).to(tl.int64)
    tl.device_assert((block >= 0) & (block < num_blocks), "a block is not in the pool")
    start = ((layer.to(tl.int64) * 2 + side) * KV_HEADS + head) * HEAD
    source = block * BLOCK_STRIDE + start + row % HEAD
    target = side.to(tl.int64) * side_stride + head.to(tl.int64) * head_stride + row
    cells = (row[:, None] + column[None, :]) < num_elements
    values = tl.load(pool + source[:, None] + column[None, :], mask=cells)
    tl.store(out + target[:, None] + column[None, :], values, mask=cells)


def merge_attention(
    out_a: Tensor,
    log_sums_a: Tensor,
    out_b: Tensor,
    log_sums_b: Tensor,
    *,
    out: Tensor | None = None,
    log_sums: Tensor | None = None,
) -> Tensor:
    """Join the results of the same queries over two sets of positions.

    Args:
        out_a: ``[num_tokens, num_heads, head_dim]``, any strides over tokens and heads.
        log_sums_a: ``[num_tokens, num_heads]`` fp32, any strides: the natural logarithm of each
            row's sum of exponentials; -inf for a row that saw nothing, of which nothing is read.
        out_b: As ``out_a``, of the same type.
        log_sums_b: Likewise.
        out: Where to write the result, contiguous; may be ``out_a`` or ``out_b``.
        log_sums: Where to write the logarithms of the sums over both, ``[num_tokens, num_heads]``
            fp32, contiguous; may be ``log_sums_a`` or ``log_sums_b``.

    Returns:
        ``[num_tokens, num_heads, head_dim]`` in the type of ``out_a``; summed in fp32. Zeros for
        rows that saw nothing in either.

    Raises:
        ValueError: An argument's shape, type, device or strides do not fit.
    """
    check_rows("out_a", out_a, like=out_a)
    check_rows("out_b", out_b, like=out_a)
    if out_b.shape != out_a.shape:
        raise ValueError(f"out_b has shape {list(out_b.shape)}, not {list(out_a.shape)}")
    for name, logs in (("log_sums_a", log_sums_a), ("log_sums_b", log_sums_b)):
        if logs.shape != out_a.shape[:2] or logs.dtype != torch.float32:
            raise ValueError(
                f"{name} is {logs.dtype} of shape {list(logs.shape)}, not torch.float32 of shape "
                f"{list(out_a.shape[:2])}"
            )
    if out is None:
        out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    check_tensor("out", out, out_a.shape, dtypes=(out_a.dtype,), like=out_a)
    if log_sums is not None:
        check_tensor("log_sums", log_sums, out_a.shape[:2], dtypes=FLOAT32, like=out_a)
    num_tokens, num_heads, head_dim = out_a.shape
    dims = power_of_2(head_dim)
    rows = max(1, _MERGED // dims)
    if num_tokens:
        _merge[(triton.cdiv(num_tokens * num_heads, rows),)](
            out_a, log_sums_a, out_b, log_sums_b, out, log_sums, num_tokens * num_heads,
            *out_a.stride()[:2], *log_sums_a.stride(), *out_b.stride()[:2], *log_sums_b.stride(),
            HEADS=num_heads, HEAD_DIM=head_dim, ROWS=rows, DIMS=dims, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["num_rows", "logs_a_token", "logs_a_head", "logs_b_token", "logs_b_head"],
    do_not_specialize_on_alignment=["logs_a", "logs_b", "log_sums"],
)
def _merge(
    out_a: tl.tensor,
    logs_a: tl.tensor,
    out_b: tl.tensor,
    logs_b: tl.tensor,
    out: tl.tensor,
    log_sums: tl.tensor,
    num_rows: tl.tensor,
    a_token: tl.tensor,
    a_head: tl.tensor,
    logs_a_token: tl.tensor,
    logs_a_head: tl.tensor,
    b_token: tl.tensor,
    b_head: tl.tensor,
    logs_b_token: tl.tensor,
    logs_b_head: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
) -> None:
    """Join ``ROWS`` pairs of (token, head)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    is_row = row < num_rows
    token, head = row // HEADS, row % HEADS
    lowest = float("-inf")
    log_a = tl.load(logs_a + token * logs_a_token + head * logs_a_head, mask=is_row, other=lowest)
    log_b = tl.load(logs_b + token * logs_b_token + head * logs_b_head, mask=is_row, other=lowest)
    top = tl.maximum(log_a, log_b)
    top = tl.where(top == lowest, 0.0, top)
    weight_a, weight_b = tl.exp(log_a - top), tl.exp(log_b - top)
    total = weight_a + weight_b
    cells = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    a_cells = (token * a_token + head * a_head)[:, None] + dim[None, :]
    b_cells = (token * b_token + head * b_head)[:, None] + dim[None, :]
    a = tl.load(out_a + a_cells, mask=cells & (weight_a > 0.0)[:, None], other=0.0)
    b = tl.load(out_b + b_cells, mask=cells & (weight_b > 0.0)[:, None], other=0.0)
    sums = a.to(tl.float32) * weight_a[:, None] + b.to(tl.float32) * weight_b[:, None]
    is_blind = total == 0.0
    total = tl.where(is_blind, 1.0, total)
    merged = sums / total[:, None]
    out_cells = row[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out + out_cells, merged.to(out.dtype.element_ty), mask=cells)
    if log_sums is not None:
        log_sum = tl.where(is_blind, lowest, tl.log(total) + top)
        tl.store(log_sums + row, log_sum, mask=is_row)
