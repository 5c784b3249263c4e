"""What the block pool asks about the order in which blocks go. Answered by the session tree."""

from __future__ import annotations

from typing import Protocol

from sessionkv.types import BlockHash, Tier

UNRETAINED, RETAINED, PINNED = 0, 1, 2
"""Ranks; a pin's priority (0 and up) is added to the last."""


class RetentionView(Protocol):
    """Ranks blocks by what sessions want kept. A question: cheap, changes nothing."""

    def rank(self, key: BlockHash, tier: Tier) -> int:
        """How late the block leaves ``tier``: 0 not retained, 1 retained, 2 and up pinned.

        Blocks of a lower rank go first. The rank of a block may change at any time; the pool asks
        again when the block is about to go.
        """
        ...


class Unretained:
    """No block is retained: plain least-recently-used order."""

    def rank(self, key: BlockHash, tier: Tier) -> int:
        """Always 0."""
        return 0
