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
one, all active segments are read about a dozen times, from the L2 cache.

Masses are exact integers (:mod:`sessionkv.kernels.sampling_scan`), so the result is the same
whatever else is in the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from sessionkv.kernels.sampling_random import below
from sessionkv.kernels.sampling_scan import INFINITE, ONE, SEGMENT, mass, weight

# Elements of one turn: 16 for each of 256 threads, whose three sums still fit into registers.
_TILE = tl.constexpr(4096)
_TILE_SEGMENTS = tl.constexpr(4096 // SEGMENT.value)
_NO_SEGMENT = tl.constexpr(2**20)  # beyond every vocabulary
_NO_ID = tl.constexpr(2**31 - 1)
_LOWEST_KEY = tl.constexpr(-(2**31))
CANDIDATES = 1024
"""Tokens that are kept in registers: 4 a thread."""
# Keys of one turn of a search in registers: 17 intervals, so 6 turns are enough for most rows.
_KEYS = tl.constexpr(16)


class _Row(NamedTuple):
    """What all parts of the search read."""

    logits: tl.tensor
    vocab_size: tl.tensor
    largest: tl.tensor
    steep: tl.tensor
    active: tl.tensor
    num_active: tl.tensor


@triton.jit
def key_of(logit: tl.tensor) -> tl.tensor:
    """int32 ordered like the fp32 logits, both zeros alike."""
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def logit_of(key: tl.tensor) -> tl.tensor:
    """The logit of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _highest_key(
    keys: tl.tensor, amounts: tl.tensor, low: tl.tensor, high: tl.tensor, goal: tl.tensor
) -> tl.tensor:
    """The highest key up to ``high`` so that elements at or above it amount to ``goal``.

    All in registers. ``low`` is a key, int64 as ``high``, at or above which is enough; ``amounts``
    are int64, and 0 for what is not there.
    """
    number = tl.arange(0, _KEYS) + 1
    while low < high:
        step = (high - low) // (_KEYS + 1) + 1  # so many steps lead past the end
        between = low + step * number
        above = keys[None, :].to(tl.int64) >= between[:, None]
        sums = tl.sum(tl.where(above, amounts[None, :], 0), 1)
        low += step * tl.sum((sums >= goal).to(tl.int64))
        high = tl.minimum(high, low + step - 1)
    return low


@triton.jit
def _ties(
    key: tl.tensor,
    missing: tl.tensor,
    largest: tl.tensor,
    steep: tl.tensor,
    BY_MASS: tl.constexpr,
) -> tl.tensor:
    """How many tokens with this key it takes to make up a number, or mass."""
    ties = missing
    if BY_MASS:
        each = tl.maximum(mass(weight(logit_of(key), largest, steep)), 1)
        ties = (missing + each - 1) // each
    return ties


@triton.jit
def _tile(row: _Row, first: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Logits and ids of a few active segments, ids rising; past the end, minus infinity."""
    lane = tl.arange(0, _TILE)
    place = first + lane // SEGMENT
    segment = tl.load(row.active + place, mask=place < row.num_active, other=_NO_SEGMENT)
    token_id = segment * SEGMENT + lane % SEGMENT
    inside = token_id < row.vocab_size
    return tl.load(row.logits + token_id, mask=inside, other=-INFINITE).to(tl.float32), token_id


@triton.jit
def _at_or_above(
    row: _Row, low: tl.tensor, step: tl.tensor, BY_MASS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Number or mass of tokens with keys from ``low`` plus one, two and three steps, int64."""
    first_key = (low + step).to(tl.int32)
    second_key = (low + 2 * step).to(tl.int32)
    third_key = (low + 3 * step).to(tl.int32)
    first = tl.zeros([_TILE], tl.int64)
    second = tl.zeros([_TILE], tl.int64)
    third = tl.zeros([_TILE], tl.int64)
    for place in range(0, row.num_active, _TILE_SEGMENTS):
        logits, _ = _tile(row, place)
        keys = key_of(logits)
        if BY_MASS:
            amount = mass(weight(logits, row.largest, row.steep))
        else:
            amount = tl.full([_TILE], 1, tl.int64)
        first += tl.where(keys >= first_key, amount, 0)
        second += tl.where(keys >= second_key, amount, 0)
        third += tl.where(keys >= third_key, amount, 0)
    return tl.sum(first), tl.sum(second), tl.sum(third)


@triton.jit
def _threshold(
    row: _Row, lowest: tl.tensor, goal: tl.tensor, BY_MASS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The highest key that ``goal`` tokens, or so much mass, are at or above; how many ties count.

    ``lowest`` is a key that enough is at or above; ``goal`` is at least 1. Of the tokens with the
    key found, those count that are needed to reach the goal.
    """
    low = lowest.to(tl.int64)
    high = key_of(row.largest).to(tl.int64)
    while low < high:
        step = (high - low) // 4 + 1  # four steps lead past the end
        first, second, third = _at_or_above(row, low, step, BY_MASS)
        reached = (first >= goal).to(tl.int32) + (second >= goal).to(tl.int32)
        reached += (third >= goal).to(tl.int32)
        low += step * reached
        high = tl.minimum(high, low + step - 1)
    above, _, _ = _at_or_above(row, low, 1, BY_MASS)
    key = low.to(tl.int32)
    return key, _ties(key, goal - above, row.largest, row.steep, BY_MASS)


@triton.jit
def _in_order(
    row: _Row, key: tl.tensor, ties: tl.tensor, min_p: tl.tensor, target: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """By rising id: where the cumulative mass of kept tokens passes ``target``, and all of it."""
    token = tl.full([], _NO_ID, tl.int32)
    total = tl.full([], 0, tl.int64)
    ties_before = tl.full([], 0, tl.int32)
    for place in range(0, row.num_active, _TILE_SEGMENTS):
        logits, token_id = _tile(row, place)
        keys = key_of(logits)
        weights = weight(logits, row.largest, row.steep)
        is_tie = (keys == key).to(tl.int32)
        counts = (is_tie > 0) & (ties_before + tl.cumsum(is_tie) <= ties)
        kept = ((keys > key) | counts) & (weights >= min_p)
        amount = tl.where(kept, mass(weights), 0)
        passed = total + tl.cumsum(amount) > target
        token = tl.minimum(token, tl.min(tl.where(passed, token_id, _NO_ID)))
        ties_before += tl.sum(is_tie)
        total += tl.sum(amount)
    return token, total


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
            bound = logit_of(_highest_key(keys, ones, low, high, top_k.to(tl.int64)).to(tl.int32))
    else:
        rest = (1.0 - top_p) * (whole.to(tl.float32) / ONE) / vocab_size
        bound = largest + tl.log2(0.5 * tl.maximum(rest, min_p)) / steep
        if top_p < 1.0:
            lowest = key_of(bound)
            masses = mass(weight(segment_largest, largest, steep))
            wanted = _mass_wanted(whole, top_p)
            if tl.sum(tl.where(keys >= lowest, masses, 0)) >= wanted:
                low = lowest.to(tl.int64)
                bound = logit_of(_highest_key(keys, masses, low, high, wanted).to(tl.int32))
    return bound


@triton.jit
def _note_candidates(
    row: _Row, lowest: tl.tensor, candidates: tl.tensor, CANDIDATES: tl.constexpr
) -> tl.tensor:
    """Write the ids of tokens with keys from ``lowest``, rising; how many, or more than fit."""
    count = tl.full([], 0, tl.int32)
    for place in range(0, row.num_active, _TILE_SEGMENTS):
        if count <= CANDIDATES:
            logits, token_id = _tile(row, place)
            reaches = ((key_of(logits) >= lowest) & (token_id < row.vocab_size)).to(tl.int32)
            at = count + tl.cumsum(reaches) - 1
            tl.store(candidates + at, token_id, mask=(reaches > 0) & (at < CANDIDATES))
            count += tl.sum(reaches)
    return count


@triton.jit
def _draw_few(
    row: _Row,
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
    token_id = tl.load(candidates + lane, mask=present, other=_NO_ID)
    logits = tl.load(row.logits + token_id, mask=present, other=-INFINITE).to(tl.float32)
    keys = tl.where(present, key_of(logits), _LOWEST_KEY)
    weights = weight(logits, row.largest, row.steep)
    masses = tl.where(present, mass(weights), 0)

    low = lowest.to(tl.int64)
    high = key_of(row.largest).to(tl.int64)
    kept = present
    if top_k > 0:
        low = _highest_key(keys, present.to(tl.int64), low, high, top_k.to(tl.int64))
        above = tl.sum((keys > low.to(tl.int32)).to(tl.int64))
        kept = _kept(keys, low.to(tl.int32), top_k.to(tl.int64) - above) & present
        whole = tl.sum(tl.where(kept, masses, 0))
    if top_p < 1.0:
        wanted = _mass_wanted(whole, top_p)
        low = _highest_key(keys, masses, low, high, wanted)
        key = low.to(tl.int32)
        missing = wanted - tl.sum(tl.where(keys > key, masses, 0))
        ties = _ties(key, missing, row.largest, row.steep, BY_MASS=True)
        kept = _kept(keys, key, ties) & present
    amounts = tl.where(kept & (weights >= min_p), masses, 0)
    target = below(bits, tl.sum(amounts))
    return tl.min(tl.where(tl.cumsum(amounts) > target, token_id, _NO_ID))


@triton.jit
def _kept(keys: tl.tensor, key: tl.tensor, ties: tl.tensor) -> tl.tensor:
    """Which of the elements are above a threshold, or among the first ties."""
    is_tie = (keys == key).to(tl.int32)
    return (keys > key) | ((is_tie > 0) & (tl.cumsum(is_tie) <= ties))


@triton.jit
def _draw_many(
    row: _Row,
    lowest: tl.tensor,
    whole: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    bits: tl.tensor,
) -> tl.tensor:
    """Draw by reading the active segments again and again."""
    key = tl.full([], _LOWEST_KEY, tl.int32)
    ties = tl.full([], 0, tl.int64)
    if top_k > 0:
        key, ties = _threshold(row, lowest, top_k.to(tl.int64), BY_MASS=False)
        lowest = key
    if top_p < 1.0:
        if top_k > 0:
            _, whole = _in_order(row, key, ties, 0.0, whole)
        key, ties = _threshold(row, lowest, _mass_wanted(whole, top_p), BY_MASS=True)
    _, total = _in_order(row, key, ties, min_p, whole)
    token, _ = _in_order(row, key, ties, min_p, below(bits, total))
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
    row = _Row(logits, vocab_size, largest, steep, active, num_active)
    lowest = key_of(bound)
    count = _note_candidates(row, lowest, candidates, CANDIDATES)
    tl.debug_barrier()  # as above
    token = tl.full([], _NO_ID, tl.int32)
    if count <= CANDIDATES:
        token = _draw_few(
            row, candidates, count, lowest, whole, top_k, top_p, min_p, bits, CANDIDATES
        )
    else:
        token = _draw_many(row, lowest, whole, top_k, top_p, min_p, bits)
    return token
