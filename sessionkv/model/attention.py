"""Attention of one step's new tokens over the blocks of their sequences, in plain torch.

A step is a ragged batch: rows of all sequences one after another, described by an
:class:`AttentionBatch` that is passed in. In each layer all new keys and values go into the pool
first; only then is anything read, so a sequence may read blocks that another one of the same batch
fills. Where nobody reads a block, since every mirror holds its history, the pool is written once,
after the last layer. Knows nothing of scheduling, leases or tiers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sessionkv.kernels.paged_kv import block_runs, gather_kv, write_kv, write_layers
from sessionkv.model.mirror import Mirror

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
# New tokens from which two passes beat one with a mask (measured on 2 cores, 1,000 to 2,000 keys).
_TWO_PARTS_ROWS = 128


@dataclass(frozen=True, slots=True)
class Segment:
    """The new tokens of one sequence in a batch; made by :func:`make_segment`.

    Attributes:
        row: Row of the first of them.
        num_rows: How many.
        start: Position of the first.
        read_runs: The table as far as this step reads blocks
            (:func:`~sessionkv.kernels.paged_kv.block_runs`); empty when the mirror already holds
            the history.
        mirror: The sequence's mirror, with room for its new tokens, or None.
        appended: The mirror's part for the new tokens, ``[num_layers, num_rows, 2, kv_heads,
            head_dim]``; None without a mirror.
        seen: Window -> the mirror's part that the queries see, ``[num_layers, 2, kv_heads, 1,
            positions, head_dim]``; of no window without a mirror.
        masks: Window -> mask of :func:`causal_mask`, for each window among the model's layers.
    """

    row: int
    num_rows: int
    start: int
    read_runs: Sequence[slice]
    mirror: Mirror | None
    appended: Tensor | None
    seen: Mapping[int | None, Tensor]
    masks: Mapping[int | None, Tensor | None]

    @property
    def end(self) -> int:
        """Position after the last new token."""
        return self.start + self.num_rows

    @property
    def rows(self) -> slice:
        """The rows of the new tokens."""
        return slice(self.row, self.row + self.num_rows)

    @property
    def is_mirrored(self) -> bool:
        """Whether the mirror holds all that was before, so that no block is read."""
        return self.mirror is not None and self.mirror.num_tokens >= self.start


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """All that attention has to know of a step.

    Attributes:
        positions: ``[num_tokens]`` int64.
        block_ids: ``[num_tokens]`` int64: block each new token is written to.
        slots: ``[num_tokens]`` int64: slot in it.
        segments: One per sequence, covering all rows in order.
        is_mirrored: No block is read, so the pool may be written after the last layer.
    """

    positions: Tensor
    block_ids: Tensor
    slots: Tensor
    segments: Sequence[Segment]
    is_mirrored: bool = field(init=False)

    def __post_init__(self) -> None:
        """See whether blocks are read."""
        object.__setattr__(self, "is_mirrored", all(s.is_mirrored for s in self.segments))


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
    end, appended, seen = start + num_rows, None, {}
    if mirror is not None:
        num_read = start if mirror.num_tokens < start else 0
        appended = mirror.data[:, :, :, start:end].permute(0, 3, 1, 2, 4)
        for window in windows:
            seen[window] = mirror.data[:, :, :, None, first_key(start, window) : end]
    return Segment(
        row=row,
        num_rows=num_rows,
        start=start,
        read_runs=block_runs(block_table[: -(-num_read // block_size)]),
        mirror=mirror,
        appended=appended,
        seen=seen,
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
    layer: int, qkv: Tensor, *, pool: Tensor, batch: AttentionBatch, window: int | None
) -> Tensor:
    """Keep the new keys and values of one layer, then let every query attend.

    Args:
        layer: Index of the layer.
        qkv: ``[num_tokens, num_heads + 2 * kv_heads, head_dim]`` fp32, rotated.
        pool: ``[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]``; written unless the
            batch is mirrored.
        batch: The step.
        window: Positions a query of this layer sees at most; None is all.

    Returns:
        ``[num_tokens, num_heads * head_dim]``.
    """
    kv_heads, head_dim = pool.shape[3], pool.shape[5]
    num_tokens, num_heads = qkv.shape[0], qkv.shape[1] - 2 * kv_heads
    group = num_heads // kv_heads
    kv = qkv[:, num_heads:].view(num_tokens, 2, kv_heads, head_dim)
    queries = qkv[:, :num_heads].view(num_tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    if not batch.is_mirrored:
        write_kv(pool, layer, kv, block_ids=batch.block_ids, slots=batch.slots)
    results = []
    for segment in batch.segments:
        rows = segment.rows
        seen = _seen(layer, kv[rows], segment, pool, window)
        result = _attend_segment(queries[:, :, rows], seen, segment, segment.masks[window])
        results.append(result.permute(2, 0, 1, 3).reshape(segment.num_rows, num_heads * head_dim))
    return results[0] if len(results) == 1 else torch.cat(results)


def _attend_segment(queries: Tensor, seen: Tensor, segment: Segment, mask: Tensor | None) -> Tensor:
    """``[kv_heads, group, num_rows, head_dim]`` of one sequence, by the way that fits its rows."""
    if mask is None and segment.num_rows > 1 and segment.start > 0:
        return _in_two_parts(queries, seen, segment.start)
    keys, values = seen.expand(-1, -1, queries.shape[1], -1, -1).unbind(0)
    if segment.num_rows == 1:
        result: Tensor = _flash(queries, keys, values)[0]
        return result
    return scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None
    )


def write_mirrored(pool: Tensor, batch: AttentionBatch) -> None:
    """Write what the mirrors got in this step into the blocks, in all layers."""
    for segment in batch.segments:
        if segment.appended is not None:
            block_ids, slots = batch.block_ids[segment.rows], batch.slots[segment.rows]
            write_layers(pool, segment.appended, block_ids=block_ids, slots=slots)


def _in_two_parts(queries: Tensor, seen: Tensor, start: int) -> Tensor:
    """All of the history, and causally the chunk itself, merged by their sums of exponentials.

    For long chunks this is a sixth faster than one pass with a mask, which computes what it hides.
    All queries see all of the history, so those that share a key head are its rows there: the
    history is read once for a group.

    Args:
        queries: ``[kv_heads, group, num_rows, head_dim]``.
        seen: ``[2, kv_heads, 1, start + num_rows, head_dim]``.
        start: Positions before the chunk.
    """
    kv_heads, group, num_rows, head_dim = queries.shape
    rows = queries.reshape(1, kv_heads, group * num_rows, head_dim)
    history = seen[:, None, :, 0, :start]
    old, old_log_sum = _flash(rows, history[0], history[1])
    chunk = seen[:, :, :, start:].expand(-1, -1, group, -1, -1)
    new, new_log_sum = _flash(queries, chunk[0], chunk[1], is_causal=True)
    weight = torch.sigmoid(old_log_sum.view(new_log_sum.shape) - new_log_sum).unsqueeze(-1)
    merged: Tensor = torch.lerp(new, old.view(queries.shape), weight)
    return merged


def _seen(layer: int, kv: Tensor, segment: Segment, pool: Tensor, window: int | None) -> Tensor:
    """What a sequence's queries see, the new tokens included.

    With a mirror: the new tokens are appended, and what it lacks before them is taken from the
    blocks, once. Without: all is read from the blocks.

    Returns:
        ``[2, kv_heads, 1, positions, head_dim]`` from :func:`first_key` on.
    """
    mirror = segment.mirror
    if mirror is None or segment.appended is None:
        out = pool.new_empty((2, pool.shape[3], segment.end, pool.shape[5]))
        gather_kv(pool, layer, segment.read_runs, out)
        return out[:, :, None, first_key(segment.start, window) :]
    if mirror.num_tokens < segment.start:
        gather_kv(pool, layer, segment.read_runs, mirror.data[layer, :, :, : segment.start])
    segment.appended[layer].copy_(kv)
    return segment.seen[window][layer]
