"""Choosing the next token of every row on the GPU, without the host.

The semantics of :mod:`sessionkv.model.sampling`: temperature, top-k, top-p of what that leaves,
min-p against the likeliest, then one random number and the inverse of the cumulative sum by rising
id. Greedy ties go to the lowest id. Two launches for any mixture of rows: every segment of every
row is scanned (:mod:`sessionkv.kernels.sampling_scan`), then one program a row chooses. Only rows
with a filter read more than one segment again.

A row's token depends on its logits, its parameters, seed and index alone. Weights are fp32 (within
1e-6), their sums exact, so a token differs from one chosen in float64 only where the random number
falls within about 1e-6 of the border between two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sessionkv.kernels.arguments import FLOAT32, FLOATS, INT32, INT64, check_tensor
from sessionkv.kernels.early_launch import let_next_start, starts_early, wait_for_earlier
from sessionkv.kernels.sampling_filter import draw_filtered
from sessionkv.kernels.sampling_random import below, random_bits
from sessionkv.kernels.sampling_scan import (
    INFINITE,
    MAX_VOCAB,
    SCAN_SEGMENTS,
    SCAN_WARPS,
    SEGMENT,
    mass,
    scan_segments,
    steepness,
    weight,
)
from sessionkv.kernels.sampling_threshold import CANDIDATES

# Filters work on tiles of 4,096 logits; so few elements a thread leave room for three sums.
_CHOOSE_WARPS = 8
_NO_ID = tl.constexpr(2**31 - 1)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of each row, on the device of the logits, all ``[rows]``.

    Attributes:
        temperature: fp32; 0 is greedy.
        top_k: int32; 0 is off.
        top_p: fp32, above 0; 1 is off.
        min_p: fp32; 0 is off.
        seed: int64 with the bits of an unsigned one.
        index: int64: number of the output; each draws its own random number.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    index: Tensor


@triton.jit
def _segment_logits(
    logits: tl.tensor, segment: tl.tensor, vocab_size: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Logits of one segment and their ids."""
    is_known = (segment >= 0) & (segment < tl.cdiv(vocab_size, SEGMENT))
    tl.device_assert(is_known, "a segment is not in the vocabulary")
    token_id = segment * SEGMENT + tl.arange(0, SEGMENT)
    values = tl.load(logits + token_id, mask=token_id < vocab_size, other=-INFINITE)
    return values.to(tl.float32), token_id


@triton.jit
def _greedy(
    logits: tl.tensor,
    segment: tl.tensor,
    segment_largest: tl.tensor,
    largest: tl.tensor,
    vocab_size: tl.tensor,
) -> tl.tensor:
    """The lowest id of the largest logit."""
    first = tl.min(tl.where(segment_largest == largest, segment, _NO_ID))
    values, token_id = _segment_logits(logits, first, vocab_size)
    return tl.min(tl.where(values == largest, token_id, _NO_ID))


@triton.jit
def _draw_plain(
    logits: tl.tensor,
    segment: tl.tensor,
    segment_largest: tl.tensor,
    segment_mass: tl.tensor,
    steep: tl.tensor,
    vocab_size: tl.tensor,
    bits: tl.tensor,
) -> tl.tensor:
    """Draw a segment by the masses of all, then a token in it by those of its own.

    The latter are against the segment's largest, so that light segments keep their precision.
    """
    ends = tl.cumsum(segment_mass)
    target = below(bits, tl.sum(segment_mass))
    chosen = tl.min(tl.where(ends > target, segment, _NO_ID))
    is_chosen = segment == chosen
    whole = tl.sum(tl.where(is_chosen, segment_mass, 0))
    part = target - tl.sum(tl.where(is_chosen, ends, 0)) + whole
    largest = tl.max(tl.where(is_chosen, segment_largest, -INFINITE))

    values, token_id = _segment_logits(logits, chosen, vocab_size)
    masses = mass(weight(values, largest, steep))
    inner_whole = tl.sum(masses)
    share = part.to(tl.float64) / whole.to(tl.float64)
    inner = tl.minimum((share * inner_whole.to(tl.float64)).to(tl.int64), inner_whole - 1)
    return tl.min(tl.where(tl.cumsum(masses) > inner, token_id, _NO_ID))


@triton.jit
def _choose_tokens(
    logits: tl.tensor,
    segments_largest: tl.tensor,
    segments_weight: tl.tensor,
    active: tl.tensor,
    candidates: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    seeds: tl.tensor,
    indices: tl.tensor,
    token_ids: tl.tensor,
    unusable: tl.tensor,
    vocab_size: tl.tensor,
    num_segments: tl.tensor,
    SEGMENTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One row. ``SEGMENTS``: power of two from ``num_segments``."""
    let_next_start(EARLY)
    wait_for_earlier(EARLY)
    row = tl.program_id(0).to(tl.int64)
    segment = tl.arange(0, SEGMENTS)
    in_row = segment < num_segments
    first_segment = row * num_segments
    logits += row * vocab_size
    segment_largest = tl.load(
        segments_largest + first_segment + segment, mask=in_row, other=-INFINITE
    )
    largest = tl.max(segment_largest)
    is_unusable = tl.abs(largest) == INFINITE
    temperature = tl.load(temperatures + row)
    tl.store(unusable + row, is_unusable)
    token = tl.full([], 0, tl.int32)
    if is_unusable:
        token = tl.full([], 0, tl.int32)
    elif temperature > 0:
        steep = steepness(temperature)
        weights = tl.load(segments_weight + first_segment + segment, mask=in_row, other=0.0)
        segment_mass = mass(weights * weight(segment_largest, largest, steep))
        bits = random_bits(tl.load(seeds + row), tl.load(indices + row))
        top_k = tl.load(top_ks + row)
        top_k = tl.where(top_k < vocab_size, top_k, 0)
        top_p = tl.load(top_ps + row)
        min_p = tl.load(min_ps + row)
        if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
            token = draw_filtered(
                logits,
                active + first_segment,
                candidates + row * CANDIDATES,
                segment,
                segment_largest,
                segment_mass,
                vocab_size,
                num_segments,
                largest,
                steep,
                top_k,
                top_p,
                min_p,
                bits,
                CANDIDATES,
            )
        else:
            token = _draw_plain(
                logits, segment, segment_largest, segment_mass, steep, vocab_size, bits
            )
    else:
        token = _greedy(logits, segment, segment_largest, largest, vocab_size)
    tl.device_assert((token >= 0) & (token < vocab_size), "a token is not in the vocabulary")
    tl.store(token_ids + row, token.to(tl.int64))


def sample_tokens(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Choose one token of each row.

    Args:
        logits: ``[rows, vocab_size]``, contiguous, bf16, fp16 or fp32, up to :data:`MAX_VOCAB`
            tokens; not changed.
        rows: Parameters; values out of their range are not checked.

    Returns:
        Token ids, ``[rows]`` int64, and whether a row is unusable, ``[rows]`` bool: it holds a NaN
        or its largest value is infinite. The token of such a row is 0.
    """
    check_tensor("logits", logits, (None, None), dtypes=FLOATS, like=logits)
    num_rows, vocab_size = logits.shape
    if not 0 < vocab_size <= MAX_VOCAB:
        raise ValueError(f"logits are of {vocab_size} tokens, not of 1 to {MAX_VOCAB}")
    for name, dtypes in (
        ("temperature", FLOAT32),
        ("top_k", INT32),
        ("top_p", FLOAT32),
        ("min_p", FLOAT32),
        ("seed", INT64),
        ("index", INT64),
    ):
        check_tensor(name, getattr(rows, name), (num_rows,), dtypes=dtypes, like=logits)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    unusable = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if not num_rows:
        return token_ids, unusable
    num_segments = triton.cdiv(vocab_size, SEGMENT.value)
    shape = (num_rows, num_segments)
    largest = torch.empty(shape, dtype=torch.float32, device=logits.device)
    weights = torch.empty_like(largest)
    early = starts_early(logits)
    scan_segments[(triton.cdiv(num_segments, SCAN_SEGMENTS), num_rows)](
        logits,
        rows.temperature,
        largest,
        weights,
        vocab_size,
        num_segments,
        SEGMENTS=SCAN_SEGMENTS,
        EARLY=early,
        num_warps=SCAN_WARPS,
        launch_pdl=early,
    )
    _choose_tokens[(num_rows,)](
        logits,
        largest,
        weights,
        torch.empty(shape, dtype=torch.int32, device=logits.device),
        torch.empty((num_rows, CANDIDATES), dtype=torch.int32, device=logits.device),
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seed,
        rows.index,
        token_ids,
        unusable,
        vocab_size,
        num_segments,
        SEGMENTS=triton.next_power_of_2(num_segments),
        CANDIDATES=CANDIDATES,
        EARLY=early,
        num_warps=_CHOOSE_WARPS,
        launch_pdl=early,
        # With TRITON_DEBUG=1 a check of every sum would take a quarter of an hour to compile.
        sanitize_overflow=False,
    )
    return token_ids, unusable
