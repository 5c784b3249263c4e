"""Keys and values in the pool of blocks: writing, copying and reading them back.

The pool is ``[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]``: one block is one
contiguous extent over all layers, the same bytes in every tier. Plain torch, for any block table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
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


def block_index(block_table: Sequence[int]) -> Tensor | slice:
    """Blocks as an index into the pool; a slice, which copies nothing, where they adjoin."""
    first = block_table[0] if block_table else 0
    if list(block_table) == list(range(first, first + len(block_table))):
        return slice(first, first + len(block_table))
    return torch.tensor(block_table, dtype=torch.int64)


def gather_kv(pool: Tensor, layer: int, block_ids: Tensor | slice, out: Tensor) -> None:
    """Read the first positions of one layer, in order, into contiguous memory.

    Args:
        pool: See the module.
        layer: Index of the layer.
        block_ids: The table, cut after the last block that is needed; see :func:`block_index`.
        out: ``[2, kv_heads, num_tokens, head_dim]``; ``num_tokens`` positions are read. The last
            dimension must be contiguous.
    """
    block_size = pool.shape[4]
    num_tokens = out.shape[2]
    full = num_tokens // block_size
    blocks = pool[block_ids, layer].permute(1, 2, 0, 3, 4)  # [2, kv_heads, blocks, slots, dim]
    if full:
        head = out[:, :, : full * block_size]
        head.view(*out.shape[:2], full, block_size, out.shape[3]).copy_(blocks[:, :, :full])
    if full * block_size < num_tokens:
        out[:, :, full * block_size :] = blocks[:, :, full, : num_tokens - full * block_size]
