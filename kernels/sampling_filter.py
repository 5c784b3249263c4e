"""Drawing from what top-k, top-p and min-p leave of one row, without sorting it.

All three keep the likeliest tokens: those above some logit, and of those equal to it the first few
by id. So each is a *threshold*: a logit and a number of ties. It is found by narrowing an interval
of *keys*, integers ordered like the logits, by counts (top-k) or masses (top-p) of the tokens above
some keys between.

The search starts with a bound that no kept token is below, found from the largest logit and the
mass of each segment alone. With a top-k, as many segments as that reach it. With a top-p, the
largest of the segments that reach it weigh enough together; where they never do, tokens lighter
than ``(1 - top_p) / vocab_size`` of the whole together weigh less than what may be left out, and
half of that is taken, so that rounding cannot matter. Only *active* segments, those with a logit
that reaches the bound, are read.

Of a peaked row few tokens reach it. They are noted, and all else happens in registers. Of a flat
one, all active segments are read a few times, from the L2 cache, until only few tokens are left
between the ends of the interval; the search then goes on in registers too.

Masses are exact integers (:mod:`sessionkv.kernels.sampling_scan`), so the result is the same
whatever else is in the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sessionkv.kernels.sampling_random import below
from sessionkv.kernels.sampling_scan import INFINITE, ONE, mass, weight
from sessionkv.kernels.sampling_threshold import (
    LOWEST_KEY,
    NO_ID,
    Row,
    above_threshold,
    draw_in_order,
    find_threshold,
    highest_key,
    key_of,
    logit_of,
    note_candidates,
    ties_of,
)


@triton.jit
def _mass_wanted(whole: tl.tensor, top_p: tl.tensor) -> tl.tensor:
    """What a top-p keeps of a mass, at least."""
    return tl.maximum(tl.ceil(top_p.to(tl.float64) * whole.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _bound(
    segment_largest: tl.tensor,
    largest: tl.tensor,
    steep: tl.tensor,
    whole: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    vocab_size: tl.tensor,
    num_segments: tl.tensor,
) -> tl.tensor:
    """A logit that no kept token is below, unless it is lighter than ``min_p``.

    With a top-k that many tokens reach it; with a top-p, tokens of the mass wanted.
    """
    bound = tl.full([], -INFINITE, tl.float32)
    keys = key_of(segment_largest)
    high = key_of(largest).to(tl.int64)
    if top_k > 0:
        if top_k <= num_segments:
            ones = tl.full(keys.shape, 1, tl.int64)
            low = tl.min(keys).to(tl.int64)
            bound = logit_of(highest_key(keys, ones, low, high, top_k.to(tl.int64)).to(tl.int32))
    else:
        rest = (1.0 - top_p) * (whole.to(tl.float32) / ONE) / vocab_size
        bound = largest + tl.log2(0.5 * tl.maximum(rest, min_p)) / steep
        if top_p < 1.0:
            lowest = key_of(bound)
            masses = mass(weight(segment_largest, largest, steep))
            wanted = _mass_wanted(whole, top_p)
            if tl.sum(tl.where(keys >= lowest, masses, 0)) >= wanted:
                low = lowest.to(tl.int64)
                bound = logit_of(highest_key(keys, masses, low, high, wanted).to(tl.int32))
    return bound


@triton.jit
def _draw_few(
    row: Row,
    candidates: tl.tensor,
    count: tl.tensor,
    lowest: tl.tensor,
    whole: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    bits: tl.tensor,
    CANDIDATES: tl.constexpr,
) -> tl.tensor:
    """Draw where all tokens that may be kept are candidates: in registers."""
    lane = tl.arange(0, CANDIDATES)
    present = lane < count
    token_id = tl.load(candidates + lane, mask=present, other=NO_ID)
    is_token = (token_id >= 0) & (token_id < row.vocab_size)
    tl.device_assert(is_token, "a candidate is not in the vocabulary", mask=present)
    logits = tl.load(row.logits + token_id, mask=present, other=-INFINITE).to(tl.float32)
    keys = tl.where(present, key_of(logits), LOWEST_KEY)
    weights = weight(logits, row.largest, row.steep)
    masses = tl.where(present, mass(weights), 0)

    low = lowest.to(tl.int64)
    high = key_of(row.largest).to(tl.int64)
    kept = present
    if top_k > 0:
        low = highest_key(keys, present.to(tl.int64), low, high, top_k.to(tl.int64))
        above = tl.sum((keys > low.to(tl.int32)).to(tl.int64))
        kept = above_threshold(keys, low.to(tl.int32), top_k.to(tl.int64) - above) & present
        whole = tl.sum(tl.where(kept, masses, 0))
    if top_p < 1.0:
        wanted = _mass_wanted(whole, top_p)
        low = highest_key(keys, masses, low, high, wanted)
        key = low.to(tl.int32)
        missing = wanted - tl.sum(tl.where(keys > key, masses, 0))
        ties = ties_of(key, missing, row.largest, row.steep, BY_MASS=True)
        kept = above_threshold(keys, key, ties) & present
    amounts = tl.where(kept & (weights >= min_p), masses, 0)
    target = below(bits, tl.sum(amounts))
    return tl.min(tl.where(tl.cumsum(amounts) > target, token_id, NO_ID))


@triton.jit
def _draw_many(
    row: Row,
    candidates: tl.tensor,
    lowest: tl.tensor,
    whole: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    bits: tl.tensor,
    CANDIDATES: tl.constexpr,
) -> tl.tensor:
    """Draw by reading the active segments again and again."""
    key = tl.full([], LOWEST_KEY, tl.int32)
    ties = tl.full([], 0, tl.int64)
    if top_k > 0:
        key, ties = find_threshold(row, candidates, lowest, top_k.to(tl.int64), False, CANDIDATES)
        lowest = key
    if top_p < 1.0:
        if top_k > 0:
            _, whole = draw_in_order(row, key, ties, 0.0, whole)
        wanted = _mass_wanted(whole, top_p)
        key, ties = find_threshold(row, candidates, lowest, wanted, True, CANDIDATES)
    _, total = draw_in_order(row, key, ties, min_p, whole)
    token, _ = draw_in_order(row, key, ties, min_p, below(bits, total))
    return token


@triton.jit
def draw_filtered(
    logits: tl.tensor,
    active: tl.tensor,
    candidates: tl.tensor,
    segment: tl.tensor,
    segment_largest: tl.tensor,
    segment_mass: tl.tensor,
    vocab_size: tl.tensor,
    num_segments: tl.tensor,
    largest: tl.tensor,
    steep: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    bits: tl.tensor,
    CANDIDATES: tl.constexpr,
) -> tl.tensor:
    """Draw one token of a row of which at least one filter is on.

    Args:
        logits: The row; its largest logit is finite.
        active: Scratch for ``num_segments`` int32.
        candidates: Scratch for ``CANDIDATES`` int32.
        segment: 0, 1 and so on, a power of two from ``num_segments``.
        segment_largest: Largest logit of each; minus infinity behind the last.
        segment_mass: Mass of each, against ``largest``.
        vocab_size: Tokens of the row.
        num_segments: Segments of the row.
        largest: Largest logit of the row.
        steep: From the temperature.
        top_k: Below ``vocab_size``; 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.
        bits: Random.
        CANDIDATES: Tokens that fit into registers; a power of two. Does not change the result.
    """
    whole = tl.sum(segment_mass)
    bound = _bound(
        segment_largest, largest, steep, whole, top_k, top_p, min_p, vocab_size, num_segments
    )
    is_active = (segment_largest >= bound) & (segment < num_segments)
    tl.store(active + tl.cumsum(is_active.to(tl.int32)) - 1, segment, mask=is_active)
    tl.debug_barrier()  # all of the list is written before any thread of the program reads it
    num_active = tl.sum(is_active.to(tl.int32))
    row = Row(logits, vocab_size, largest, steep, active, num_active)
    lowest = key_of(bound)
    count = note_candidates(row, lowest, key_of(largest), candidates, CANDIDATES)
    tl.debug_barrier()  # as above
    token = tl.full([], NO_ID, tl.int32)
    if count <= CANDIDATES:
        token = _draw_few(
            row, candidates, count, lowest, whole, top_k, top_p, min_p, bits, CANDIDATES
        )
    else:
        token = _draw_many(row, candidates, lowest, whole, top_k, top_p, min_p, bits, CANDIDATES)
    return token
