"""Philox4x32-10 in Triton: the same bits as :mod:`sessionkv.kernels.philox`, where the source is.

Words of 32 bits are kept in 64, so that products need no high-half instruction and nothing wraps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sessionkv.kernels import philox

_ROUNDS = tl.constexpr(philox.ROUNDS)
_FIRST_MULTIPLIER = tl.constexpr(philox.MULTIPLIERS[0])
_SECOND_MULTIPLIER = tl.constexpr(philox.MULTIPLIERS[1])
_FIRST_KEY_STEP = tl.constexpr(philox.KEY_STEPS[0])
_SECOND_KEY_STEP = tl.constexpr(philox.KEY_STEPS[1])
_RANDOM_BITS = tl.constexpr(philox.RANDOM_BITS)
_U32 = tl.constexpr(0xFFFFFFFF)


@triton.jit
def random_bits(seed: tl.tensor, index: tl.tensor) -> tl.tensor:
    """53 random bits as uint64; ``seed`` and ``index`` are int64 with the bits of unsigned ones."""
    k0 = seed.to(tl.uint64) & _U32
    k1 = seed.to(tl.uint64) >> 32
    c0 = index.to(tl.uint64) & _U32
    c1 = index.to(tl.uint64) >> 32
    c2 = c0 * 0
    c3 = c0 * 0
    for _ in tl.static_range(_ROUNDS):
        first = c0 * _FIRST_MULTIPLIER
        second = c2 * _SECOND_MULTIPLIER
        c0 = (second >> 32) ^ c1 ^ k0
        c1 = second & _U32
        c2 = (first >> 32) ^ c3 ^ k1
        c3 = first & _U32
        k0 = (k0 + _FIRST_KEY_STEP) & _U32
        k1 = (k1 + _SECOND_KEY_STEP) & _U32
    return ((c1 << 32) | c0) >> (64 - _RANDOM_BITS)


@triton.jit
def below(bits: tl.tensor, total: tl.tensor) -> tl.tensor:
    """``floor(number * total)`` exactly, of the number in [0, 1) with these 53 bits.

    ``total`` is a positive int64; so is the result, and smaller.
    """
    return tl.umulhi(bits << (64 - _RANDOM_BITS), total.to(tl.uint64)).to(tl.int64)
