"""Keys and values in the pool of blocks: writing, copying and reading them back.

The pool is ``[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]``: one block is one
contiguous extent over all layers, the same bytes in every tier. Plain torch, for any block table.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def write_kv(pool: Tensor, layer: int, kv: Tensor, *, block_ids: Tensor, slots: Tensor) -> None:
    """Write the keys and values of new tokens into their slots.

    Args:
        pool: See the module; written in place.
        layer: Index of the layer.
        kv: ``[num_tokens, 2, kv_heads, head_dim]``, any strides.
        block_ids: ``[num_tokens]`` int64.
        slots: ``[num_tokens]`` int64, below the block size.
    """
    pool[block_ids, layer, :, :, slots] = kv


def write_layers(pool: Tensor, kv: Tensor, *, block_ids: Tensor, slots: Tensor) -> None:
    """Write the keys and values of new tokens into their slots, in all layers at once.

    Args:
        pool: See the module; written in place.
        kv: ``[num_layers, num_tokens, 2, kv_heads, head_dim]``, any strides.
        block_ids: ``[num_tokens]`` int64.
        slots: ``[num_tokens]`` int64, below the block size.
    """
    pool[block_ids, :, :, :, slots] = kv.transpose(0, 1)


def copy_slots(pool: Tensor, *, src: int, dst: int, num_tokens: int) -> None:
    """Copy the first ``num_tokens`` slots of one block into another, over all layers."""
    pool[dst, :, :, :, :num_tokens] = pool[src, :, :, :, :num_tokens]


def block_runs(block_table: Sequence[int]) -> tuple[slice, ...]:
    """The table as runs of blocks that adjoin in the pool, in order. Cost: O(blocks)."""
    runs: list[slice] = []
    for block in block_table:
        if runs and runs[-1].stop == block:
            runs[-1] = slice(runs[-1].start, block + 1)
        else:
            runs.append(slice(block, block + 1))
    return tuple(runs)


def gather_kv(pool: Tensor, layer: int, runs: Sequence[slice], out: Tensor) -> None:
    """Read the first positions of one layer, in order, into contiguous memory.

    A copy for each run: for a table in any order not slower than an index over all of its blocks,
    which would copy them twice, and for the few runs of a usual one several times as fast.

    Args:
        pool: See the module.
        layer: Index of the layer.
        runs: The table, cut after the last block that is needed; see :func:`block_runs`.
        out: ``[2, kv_heads, num_tokens, head_dim]``; ``num_tokens`` positions are read. The last
            dimension must be contiguous.
    """
    block_size, num_tokens = pool.shape[4], out.shape[2]
    start = 0
    for run in runs:
        blocks = pool[run, layer].permute(1, 2, 0, 3, 4)  # [2, kv_heads, blocks, slots, dim]
        full = min(blocks.shape[2], (num_tokens - start) // block_size)
        end = start + full * block_size
        if full:
            whole = out[:, :, start:end]
            whole.view(*out.shape[:2], full, block_size, -1).copy_(blocks[:, :, :full])
        if end < num_tokens and full < blocks.shape[2]:
            out[:, :, end:] = blocks[:, :, full, : num_tokens - end]
        start = end
