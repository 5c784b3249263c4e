"""Which program of attention does what: a list on the device, made from the lengths that lie there.

A *tile* is a run of new tokens of one sequence; all programs of one key head together do each tile
once. What long tiles see is divided into parts, so that no program works much longer than others:
with ``total`` positions to be seen, none gets more than about ``total / extra``. Then there are at
most ``extra`` items more than tiles, which the host knows without knowing lengths, so that a
captured graph divides the work of whatever batch it is replayed with.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sessionkv.kernels.early_launch import let_next_start, wait_for_earlier

ITEM = tl.constexpr(4)
"""int32 of an item: sequence (-1: nothing to do), first new token, part, number of parts. The
parts of a tile are consecutive items."""
# Items of one program, and sequences looked at together: their pairs fit into registers.
LISTED = 64
_SEQUENCES = tl.constexpr(128)


@triton.jit
def _tiles_and_seen(
    query_starts: tl.tensor,
    seq_lens: tl.tensor,
    seqs: tl.tensor,
    num_seqs: tl.tensor,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Tiles of each sequence, and positions that one of them sees at most."""
    inside = seqs < num_seqs
    if query_starts is None:
        tiles = inside.to(tl.int32)
    else:
        starts = tl.load(query_starts + seqs, mask=inside, other=0)
        ends = tl.load(query_starts + seqs + 1, mask=inside, other=0)
        tl.device_assert(ends >= starts, "a sequence ends before it starts")
        tiles = (ends - starts + TOKENS - 1) // TOKENS
    seen = tl.load(seq_lens + seqs, mask=inside, other=0)
    if WINDOW is not None:
        seen = tl.minimum(seen, WINDOW + TOKENS - 1)
    return tiles, seen


@triton.jit(
    do_not_specialize=["num_seqs", "num_items", "extra", "num_parts"],
    do_not_specialize_on_alignment=["query_starts", "seq_lens"],
)
def list_work(
    query_starts: tl.tensor,
    seq_lens: tl.tensor,
    items: tl.tensor,
    num_seqs: tl.tensor,
    num_items: tl.tensor,
    extra: tl.tensor,
    num_parts: tl.tensor,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    LEAST: tl.constexpr,
    MULTIPLE: tl.constexpr,
    LISTED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Write some items of the list; every program goes through all sequences by itself.

    Args:
        query_starts: ``[num_seqs + 1]`` int32, or None: one new token of each sequence.
        seq_lens: ``[num_seqs]`` int32.
        items: ``[num_items, ITEM]`` int32; written.
        num_seqs: Sequences.
        num_items: Room; at least the tiles and ``extra``, or the tiles times ``num_parts``.
        extra: At most so many items more than tiles.
        num_parts: Parts of each tile, whatever its length; 0 is as many as fit.
        WINDOW: Positions a query sees at most, or None.
        TOKENS: New tokens of a tile.
        LEAST: No part is shorter, as far as it can be helped.
        MULTIPLE: Parts are of so many positions or a multiple.
        LISTED: Items of one program.
        EARLY: See :mod:`~sessionkv.kernels.early_launch`.
    """
    let_next_start(EARLY)
    wait_for_earlier(EARLY)
    total = tl.full([], 0, tl.int64)
    for first in range(0, num_seqs, _SEQUENCES):
        seqs = first + tl.arange(0, _SEQUENCES)
        tiles, seen = _tiles_and_seen(query_starts, seq_lens, seqs, num_seqs, WINDOW, TOKENS)
        total += tl.sum(tiles.to(tl.int64) * seen)
    longest = tl.maximum((total + extra - 1) // extra, LEAST).to(tl.int32)
    longest = (longest + MULTIPLE - 1) // MULTIPLE * MULTIPLE

    item = tl.program_id(0) * LISTED + tl.arange(0, LISTED)
    owner = tl.full([LISTED], -1, tl.int32)
    within = tl.zeros([LISTED], tl.int32)
    divided = tl.zeros([LISTED], tl.int32)
    end = tl.full([], 0, tl.int32)
    for first in range(0, num_seqs, _SEQUENCES):
        seqs = first + tl.arange(0, _SEQUENCES)
        tiles, seen = _tiles_and_seen(query_starts, seq_lens, seqs, num_seqs, WINDOW, TOKENS)
        parts = tl.maximum((seen + longest - 1) // longest, 1)
        parts = tl.where(num_parts > 0, num_parts, parts)
        counts = tiles * parts
        ends = end + tl.cumsum(counts)
        begins = ends - counts
        mine = (item[:, None] >= begins[None, :]) & (item[:, None] < ends[None, :])
        owner += tl.sum(tl.where(mine, seqs[None, :] + 1, 0), 1)
        within += tl.sum(tl.where(mine, item[:, None] - begins[None, :], 0), 1)
        divided += tl.sum(tl.where(mine, parts[None, :], 0), 1)
        end += tl.sum(counts)
    tl.device_assert(end <= num_items, "the list has no room for the work")
    parts_of_item = tl.maximum(divided, 1)
    at = items + item * ITEM
    inside = item < num_items
    tl.store(at, owner, mask=inside)
    tl.store(at + 1, within // parts_of_item * TOKENS, mask=inside)
    tl.store(at + 2, within % parts_of_item, mask=inside)
    tl.store(at + 3, parts_of_item, mask=inside)
