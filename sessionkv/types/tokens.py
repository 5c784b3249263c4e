"""Token ids as bytes, the one form that wire, journal and block store share."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

TOKEN_BYTES = 4
"""Bytes of a packed token id."""


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as unsigned 32-bit little-endian integers, one after another.

    Raises:
        OverflowError: An id does not fit.
        TypeError: One is not an integer.
    """
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """The way back from :func:`pack_tokens`.

    Raises:
        ValueError: Not a whole number of ids.
    """
    token_ids = array("I", packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids.tolist()
