"""Attention of one step's new tokens over the blocks of their sequences, in plain torch.

A step is a ragged batch: rows of all sequences one after another, described by an
:class:`AttentionBatch` that is passed in. In each layer all new keys and values go into the pool
first; only then is anything read, so a sequence may read blocks that another one of the same batch
fills. Knows nothing of scheduling, leases or tiers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sessionkv.kernels.paged_kv import block_index, gather_kv, write_kv
from sessionkv.model.mirror import Mirror

# New tokens from which two passes beat one with a mask (measured on 2 cores, 1,000 to 2,000 keys).
_TWO_PARTS_ROWS = 128


@dataclass(frozen=True, slots=True)
class Segment:
    """The new tokens of one sequence in a batch; made by :func:`make_segment`.

    Attributes:
        row: Row of the first of them.
        num_rows: How many.
        start: Position of the first.
        block_ids: The table as far as this step reads blocks, as an index into the pool
            (:func:`~sessionkv.kernels.paged_kv.block_index`); of no block when the mirror already
            holds the history.
        mirror: The sequence's mirror, with room for its new tokens, or None.
        masks: Window -> mask of :func:`causal_mask`, for each window among the model's layers.
    """

    row: int
    num_rows: int
    start: int
    block_ids: Tensor | slice
    mirror: Mirror | None
    masks: Mapping[int | None, Tensor | None]

    @property
    def end(self) -> int:
        """Position after the last new token."""
        return self.start + self.num_rows


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """All that attention has to know of a step.

    Attributes:
        positions: ``[num_tokens]`` int64.
        block_ids: ``[num_tokens]`` int64: block each new token is written to.
        slots: ``[num_tokens]`` int64: slot in it.
        segments: One per sequence, covering all rows in order.
    """

    positions: Tensor
    block_ids: Tensor
    slots: Tensor
    segments: Sequence[Segment]


def make_segment(
    *,
    row: int,
    num_rows: int,
    start: int,
    block_table: Sequence[int],
    mirror: Mirror | None,
    block_size: int,
    windows: Iterable[int | None],
) -> Segment:
    """Describe one sequence's part of a step. Cost: O(blocks) only where blocks will be read."""
    num_read = start + num_rows  # positions that this step reads from blocks
    if mirror is not None:
        num_read = start if mirror.num_tokens < start else 0
    return Segment(
        row=row,
        num_rows=num_rows,
        start=start,
        block_ids=block_index(block_table[: -(-num_read // block_size)]),
        mirror=mirror,
        masks={window: causal_mask(start, num_rows, window) for window in windows},
    )


def first_key(position: int, window: int | None) -> int:
    """First position that a query sees."""
    return 0 if window is None else max(0, position + 1 - window)


def causal_mask(start: int, num_rows: int, window: int | None) -> Tensor | None:
    """Additive mask of queries ``start ..`` over keys ``first_key(start) .. start + num_rows``.

    None where none is needed: a single query sees all of its keys, and without a window the first
    chunk is plainly causal and a long one is computed in two parts (:func:`_in_two_parts`).
    """
    if num_rows == 1 or (window is None and (start == 0 or num_rows >= _TWO_PARTS_ROWS)):
        return None
    queries = torch.arange(start, start + num_rows)[:, None]
    keys = torch.arange(first_key(start, window), start + num_rows)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


def attend(
    layer: int,
    qkv: Tensor,
    *,
    pool: Tensor,
    batch: AttentionBatch,
    window: int | None,
    out: Tensor,
) -> None:
    """Write the new keys and values of one layer, then let every query attend.

    Args:
        layer: Index of the layer.
        qkv: ``[num_tokens, num_heads + 2 * kv_heads, head_dim]`` fp32, rotated.
        pool: ``[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]``; written.
        batch: The step.
        window: Positions a query of this layer sees at most; None is all.
        out: ``[num_tokens, num_heads, head_dim]``; written.
    """
    kv_heads, head_dim = pool.shape[3], pool.shape[5]
    num_heads = out.shape[1]
    num_tokens, group = out.shape[0], num_heads // kv_heads
    kv = qkv[:, num_heads:].view(num_tokens, 2, kv_heads, head_dim)
    write_kv(pool, layer, kv, block_ids=batch.block_ids, slots=batch.slots)
    queries = qkv[:, :num_heads].view(num_tokens, kv_heads, group, head_dim)
    results = out.view(num_tokens, kv_heads, group, head_dim)
    for segment in batch.segments:
        rows = slice(segment.row, segment.row + segment.num_rows)
        history = _history(layer, kv[rows], segment, pool)
        seen = history[:, :, None, first_key(segment.start, window) : segment.end]
        seen = seen.expand(-1, -1, group, -1, head_dim)
        asked, mask = queries[rows].permute(1, 2, 0, 3), segment.masks[window]
        if mask is None and segment.num_rows > 1 and segment.start > 0:
            result = _in_two_parts(asked, seen, segment.start)
        else:
            causal = mask is None and segment.num_rows > 1
            result = scaled_dot_product_attention(
                asked, seen[0], seen[1], attn_mask=mask, is_causal=causal
            )
        results[rows] = result.permute(2, 0, 1, 3)


def _in_two_parts(queries: Tensor, seen: Tensor, start: int) -> Tensor:
    """All of the history, and causally the chunk itself, merged by their sums of exponentials.

    For long chunks this is a sixth faster than one pass with a mask, which computes what it hides.

    Args:
        queries: ``[kv_heads, group, num_rows, head_dim]``.
        seen: ``[2, kv_heads, group, start + num_rows, head_dim]``.
        start: Positions before the chunk.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    history = seen[:, :, :, :start]
    chunk = seen[:, :, :, start:]
    old, old_log_sum = flash(queries, history[0], history[1])
    new, new_log_sum = flash(queries, chunk[0], chunk[1], is_causal=True)
    merged: Tensor = torch.lerp(new, old, torch.sigmoid(old_log_sum - new_log_sum).unsqueeze(-1))
    return merged


def _history(layer: int, kv: Tensor, segment: Segment, pool: Tensor) -> Tensor:
    """Keys and values of the sequence, new ones included: ``[2, kv_heads, positions, head_dim]``.

    With a mirror: the new tokens are appended, and what it lacks before them is taken from the
    blocks, once. Without: all is read from the blocks.
    """
    mirror = segment.mirror
    if mirror is None:
        out = pool.new_empty((2, pool.shape[3], segment.end, pool.shape[5]))
        gather_kv(pool, layer, segment.block_ids, out)
        return out
    data = mirror.data[layer]
    if mirror.num_tokens < segment.start:
        gather_kv(pool, layer, segment.block_ids, data[:, :, : segment.start])
    data[:, :, segment.start : segment.end] = kv.permute(1, 2, 0, 3)
    return data
