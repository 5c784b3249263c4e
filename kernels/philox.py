"""Random numbers as a pure function of a seed and a count: Philox4x32-10 in plain Python.

Counter-based, so there is no state to keep, to copy or to restore, and every device computes the
same bits; :mod:`sessionkv.kernels.sampling_random` is the same in Triton. The algorithm is from
Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
Standard library only; must not know of torch or triton.
"""

from __future__ import annotations

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
"""By how much the two words of the key grow each round: golden ratio and sqrt(3) - 1."""

RANDOM_BITS = 53
"""Bits of a draw: as many as a float64 in [0, 1) holds in even steps."""

_U32 = 0xFFFFFFFF


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Turn a counter into four random words of 32 bits.

    Args:
        counter: Four words of 32 bits, the lowest first.
        key: Two words of 32 bits, the lowest first.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (second >> 32) ^ c1 ^ k0,
            second & _U32,
            (first >> 32) ^ c3 ^ k1,
            first & _U32,
        )
        k0, k1 = (k0 + KEY_STEPS[0]) & _U32, (k1 + KEY_STEPS[1]) & _U32
    return c0, c1, c2, c3


def random_bits(seed: int, index: int) -> int:
    """The draw number ``index`` of ``seed``: 53 random bits, 0 to ``2**53 - 1``.

    Args:
        seed: 0 to ``2**64 - 1``; the key.
        index: 0 to ``2**64 - 1``; the lower half of the counter.
    """
    low, high, _, _ = philox4x32((index & _U32, index >> 32, 0, 0), (seed & _U32, seed >> 32))
    return ((high << 32) | low) >> (64 - RANDOM_BITS)
