"""The first of the two passes of sampling: what is in each segment of each row of logits.

A segment is :data:`SEGMENT` neighbouring ids. Its largest logit and its mass are all that choosing
a token needs to look at few segments only: greedy at one, a plain draw at one, a filtered draw at
those that hold a token the filters may leave. Segments do not depend on the batch, and neither does
anything computed of a row.

Weights are ``exp((logit - largest) / temperature)``, at most 1. They become *mass*, integers of
units of ``2**-44``: sums of integers are exact in any order, so that thresholds and cumulative sums
agree wherever they are computed, and those of 2**18 tokens stay below ``2**63``. A token lighter
than one unit is never drawn; its probability is below ``6e-14``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sessionkv.kernels.early_launch import let_next_start, wait_for_earlier

SEGMENT = tl.constexpr(256)
MAX_VOCAB = 262_144
"""So many masses add up to ``2**62``."""
SCAN_SEGMENTS = 16
"""Segments of one program: one row of 152k logits spreads over 38, each thread loads 32 bytes."""
SCAN_WARPS = 8

ONE = tl.constexpr(2.0**44)
INFINITE = tl.constexpr(float("inf"))
_LOG2_E = tl.constexpr(1.4426950408889634)
_STEEPEST = tl.constexpr(1.0e30)  # finite, so that no difference at all stays none


@triton.jit
def steepness(temperature: tl.tensor) -> tl.tensor:
    """Factor from differences of logits to binary logarithms of weights; temperature above 0."""
    return tl.minimum(_LOG2_E / temperature, _STEEPEST)


@triton.jit
def weight(logit: tl.tensor, largest: tl.tensor, steep: tl.tensor) -> tl.tensor:
    """Weight against the finite ``largest``: fp32, 1 at most where that is the largest."""
    return tl.exp2((logit - largest) * steep)


@triton.jit
def mass(weights: tl.tensor) -> tl.tensor:
    """Weights in whole units, int64."""
    return (weights * ONE).to(tl.int64)


@triton.jit
def scan_segments(
    logits: tl.tensor,
    temperatures: tl.tensor,
    largest: tl.tensor,
    weights: tl.tensor,
    vocab_size: tl.tensor,
    num_segments: tl.tensor,
    SEGMENTS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Largest logit of each segment and, unless greedy, its weight against that, ``[rows, n]``.

    A segment with a NaN reports infinity as its largest, which makes the row as unusable. It is
    left out of the sums, so nothing else changes.
    """
    let_next_start(EARLY)
    wait_for_earlier(EARLY)
    row = tl.program_id(1).to(tl.int64)
    segment = tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS)
    token_id = segment[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :]
    at = logits + row * vocab_size + token_id
    values = tl.load(at, mask=token_id < vocab_size, other=-INFINITE).to(tl.float32)
    is_nan = values != values
    values = tl.where(is_nan, -INFINITE, values)
    top = tl.max(values, 1)
    has_nan = tl.max(is_nan.to(tl.int32), 1) > 0
    inside = segment < num_segments
    at_segment = row * num_segments + segment
    tl.store(largest + at_segment, tl.where(has_nan, INFINITE, top), mask=inside)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        base = tl.where(tl.abs(top) < INFINITE, top, 0.0)[:, None]
        total = tl.sum(weight(values, base, steepness(temperature)), 1)
        tl.store(weights + at_segment, total, mask=inside)
