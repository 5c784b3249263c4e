"""What an index knows of one block, and its bytes: the value of ``entries``.

::

    xxh3-64 of (key, rest) | slot u32 | stamp u64 | height u24, rank u8 | parent 32 | token ids

Integers are little-endian. A value that does not match its checksum is as none.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

MAX_RANK = 126
_BODY = struct.Struct("<IQI32s")
_HEIGHT_BITS = 24  # rank and height share 32
_SEAL_BYTES = 8
_PARENT_BYTES = 32


@dataclass(frozen=True, slots=True)
class Entry:
    """What the index knows of one block. ``tokens`` are 32-bit little-endian ids."""

    key: bytes
    parent: bytes
    tokens: bytes
    slot: int
    stamp: int = 0
    height: int = 0
    rank: int = 0


def sealed(entry: Entry) -> bytes:
    """The value of an entry; the checksum covers the key too."""
    rank_and_height = entry.rank << _HEIGHT_BITS | entry.height
    body = _BODY.pack(entry.slot, entry.stamp, rank_and_height, entry.parent) + entry.tokens
    return xxhash.xxh3_64_digest(entry.key + body) + body


def opened(key: bytes, value: bytes) -> Entry | None:
    """The entry under a key; None where the value is damaged."""
    body = value[_SEAL_BYTES:]
    if len(body) < _BODY.size or xxhash.xxh3_64_digest(key + body) != value[:_SEAL_BYTES]:
        return None
    slot, stamp, rank_and_height, parent = _BODY.unpack_from(body)
    rank, height = rank_and_height >> _HEIGHT_BITS, rank_and_height % (1 << _HEIGHT_BITS)
    return Entry(key, parent, body[_BODY.size :], slot, stamp, height, rank)


def slot_in(value: bytes, key: bytes, parent: bytes, tokens: bytes) -> int | None:
    """The slot, where the entry is of that parent and tokens; without making an entry of it."""
    body = value[_SEAL_BYTES:]
    if body[_BODY.size - _PARENT_BYTES :] != parent + tokens:
        return None
    is_sound = xxhash.xxh3_64_digest(key + body) == value[:_SEAL_BYTES]
    return int.from_bytes(body[:4], "little") if is_sound else None
