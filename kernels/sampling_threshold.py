"""Thresholds of one row of logits: which key so many tokens, or so much mass, are at or above.

A *key* is an integer ordered like the logits. A threshold is found by narrowing an interval of keys
by counts or masses of the tokens above some keys between: first by reading segments, until only few
tokens are left between the ends of the interval; these are noted, and the search goes on in
registers. Masses are exact integers (:mod:`sessionkv.kernels.sampling_scan`), so any way of
searching finds the same.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from sessionkv.kernels.sampling_scan import INFINITE, SEGMENT, mass, weight

# Elements of one turn: 16 for each of 256 threads, whose three sums still fit into registers.
_TILE = tl.constexpr(4096)
_TILE_SEGMENTS = tl.constexpr(4096 // SEGMENT.value)
_NO_SEGMENT = tl.constexpr(2**20)  # beyond every vocabulary
NO_ID = tl.constexpr(2**31 - 1)
LOWEST_KEY = tl.constexpr(-(2**31))
CANDIDATES = 1024
"""Tokens that are kept in registers: 4 a thread."""
# Keys of one turn of a search in registers: 17 intervals, so 6 turns are enough for most rows.
_KEYS = tl.constexpr(16)
# Of a search that reads segments: after four turns few tokens are left between, as a rule. Any
# interval of keys is a single one after 17.
_FIRST_TURNS = tl.constexpr(4)
_ALL_TURNS = tl.constexpr(17)


class Row(NamedTuple):
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
def highest_key(
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
def ties_of(
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
def _tile(row: Row, first: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Logits and ids of a few active segments, ids rising; past the end, minus infinity."""
    lane = tl.arange(0, _TILE)
    place = first + lane // SEGMENT
    present = place < row.num_active
    segment = tl.load(row.active + place, mask=present, other=_NO_SEGMENT)
    is_segment = (segment >= 0) & (segment < tl.cdiv(row.vocab_size, SEGMENT))
    tl.device_assert(is_segment, "an active segment is not in the vocabulary", mask=present)
    token_id = segment * SEGMENT + lane % SEGMENT
    inside = token_id < row.vocab_size
    return tl.load(row.logits + token_id, mask=inside, other=-INFINITE).to(tl.float32), token_id


@triton.jit
def _at_or_above(
    row: Row, low: tl.tensor, step: tl.tensor, BY_MASS: tl.constexpr
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
def _narrow(
    row: Row,
    low: tl.tensor,
    high: tl.tensor,
    goal: tl.tensor,
    turns: tl.tensor,
    BY_MASS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Narrow an interval of keys around the threshold to a quarter, ``turns`` times at most."""
    while (low < high) & (turns > 0):
        step = (high - low) // 4 + 1  # four steps lead past the end
        first, second, third = _at_or_above(row, low, step, BY_MASS)
        reached = (first >= goal).to(tl.int32) + (second >= goal).to(tl.int32)
        reached += (third >= goal).to(tl.int32)
        low += step * reached
        high = tl.minimum(high, low + step - 1)
        turns -= 1
    return low, high


@triton.jit
def note_candidates(
    row: Row,
    lowest: tl.tensor,
    highest: tl.tensor,
    candidates: tl.tensor,
    CANDIDATES: tl.constexpr,
) -> tl.tensor:
    """Write the ids of tokens with keys between, rising; how many, or more than fit."""
    count = tl.full([], 0, tl.int32)
    for place in range(0, row.num_active, _TILE_SEGMENTS):
        if count <= CANDIDATES:
            logits, token_id = _tile(row, place)
            keys = key_of(logits)
            reaches = (keys >= lowest) & (keys <= highest) & (token_id < row.vocab_size)
            reaches = reaches.to(tl.int32)
            at = count + tl.cumsum(reaches) - 1
            tl.store(candidates + at, token_id, mask=(reaches > 0) & (at < CANDIDATES))
            count += tl.sum(reaches)
    return count


@triton.jit
def find_threshold(
    row: Row,
    candidates: tl.tensor,
    lowest: tl.tensor,
    goal: tl.tensor,
    BY_MASS: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The highest key that ``goal`` tokens, or so much mass, are at or above; how many ties count.

    ``lowest`` is a key that enough is at or above; ``goal`` is at least 1. Of the tokens with the
    key found, those count that are needed to reach the goal.
    """
    low = lowest.to(tl.int64)
    high = key_of(row.largest).to(tl.int64)
    low, high = _narrow(row, low, high, goal, _FIRST_TURNS + goal * 0, BY_MASS)
    above, _, _ = _at_or_above(row, high, 1, BY_MASS)
    tl.debug_barrier()  # nobody reads what was noted before
    count = note_candidates(row, low.to(tl.int32), high.to(tl.int32), candidates, CANDIDATES)
    tl.debug_barrier()  # all is written before any thread of the program reads it
    if count <= CANDIDATES:
        lane = tl.arange(0, CANDIDATES)
        present = lane < count
        token_id = tl.load(candidates + lane, mask=present, other=NO_ID)
        is_token = (token_id >= 0) & (token_id < row.vocab_size)
        tl.device_assert(is_token, "a candidate is not in the vocabulary", mask=present)
        logits = tl.load(row.logits + token_id, mask=present, other=-INFINITE).to(tl.float32)
        keys = tl.where(present, key_of(logits), LOWEST_KEY)
        amounts = present.to(tl.int64)
        if BY_MASS:
            amounts = tl.where(present, mass(weight(logits, row.largest, row.steep)), 0)
        low = highest_key(keys, amounts, low, high, goal - above)
        above += tl.sum(tl.where(keys > low.to(tl.int32), amounts, 0))
    else:
        low, high = _narrow(row, low, high, goal, _ALL_TURNS + goal * 0, BY_MASS)
        above, _, _ = _at_or_above(row, low, 1, BY_MASS)
    key = low.to(tl.int32)
    return key, ties_of(key, goal - above, row.largest, row.steep, BY_MASS)


@triton.jit
def draw_in_order(
    row: Row, key: tl.tensor, ties: tl.tensor, min_p: tl.tensor, target: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """By rising id: where the cumulative mass of kept tokens passes ``target``, and all of it."""
    token = tl.full([], NO_ID, tl.int32)
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
        token = tl.minimum(token, tl.min(tl.where(passed, token_id, NO_ID)))
        ties_before += tl.sum(is_tie)
        total += tl.sum(amount)
    return token, total


@triton.jit
def above_threshold(keys: tl.tensor, key: tl.tensor, ties: tl.tensor) -> tl.tensor:
    """Which of the elements are above a threshold, or among the first ties."""
    is_tie = (keys == key).to(tl.int32)
    return (keys > key) | ((is_tie > 0) & (tl.cumsum(is_tie) <= ties))
