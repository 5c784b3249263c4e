"""Packed masks of tokens, as plans have them."""

from collections.abc import Collection


def packed(allowed: Collection[int], vocab_size: int) -> bytes:
    """A mask that allows these tokens."""
    bits = sum(1 << token_id for token_id in set(allowed))
    return bits.to_bytes(-(-vocab_size // 32) * 4, "little")
