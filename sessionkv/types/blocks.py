"""What a KV block is, wherever it lives."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""32 bytes of the hash chain; names the KV of a block *and* of everything before it."""


class Tier(enum.Enum):
    """Where a block's bytes are; ordered from fast to slow by ``rank``."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    # Enum hashes the name, in Python; tiers are looked up several times for every block moved.
    __hash__ = object.__hash__

    @property
    def rank(self) -> int:
        """0 for DEVICE, 1 for HOST, 2 for DISK."""
        return ("device", "host", "disk").index(self.value)


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """Identity of one block's content; travels with its bytes through every tier.

    Attributes:
        key: Chain hash of a full block, or the partial key of an unfilled one.
        parent: Chain hash of the block before it (the root hash for block 0).
        token_ids: The tokens whose KV the block holds; fewer than the block size for a tail.
    """

    key: BlockHash
    parent: BlockHash
    token_ids: tuple[int, ...]

    @property
    def fill(self) -> int:
        """Number of slots that are written."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape of the KV of one block: ``[num_layers, 2, num_kv_heads, block_size, head_dim]``.

    Attributes:
        dtype: Name of the element type, such as ``"float32"``; part of the identity.
        element_bytes: Bytes of one element.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    element_bytes: int

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's extent, the same in every tier."""
        return self.token_bytes * self.block_size
