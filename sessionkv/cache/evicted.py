"""A bounded memory of blocks that left every tier, so that a miss can be explained."""

from __future__ import annotations

from sessionkv.types import BlockHash

MAX_REMEMBERED = 65_536


class EvictedKeys:
    """The last ``limit`` keys that left all tiers, oldest forgotten first. O(1) a call."""

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        self._corrupt: dict[BlockHash, bool] = {}

    def __len__(self) -> int:
        return len(self._corrupt)

    def __contains__(self, key: BlockHash) -> bool:
        return key in self._corrupt

    def was_corrupt(self, key: BlockHash) -> bool:
        """Whether the block left because its bytes were damaged."""
        return self._corrupt.get(key, False)

    def add(self, key: BlockHash, *, corrupt: bool = False) -> None:
        """Remember that the block left; damage is remembered until it is back."""
        self._corrupt[key] = self._corrupt.pop(key, False) or corrupt
        if len(self._corrupt) > self._limit:
            del self._corrupt[next(iter(self._corrupt))]

    def discard(self, key: BlockHash) -> None:
        """The block is back."""
        self._corrupt.pop(key, None)
