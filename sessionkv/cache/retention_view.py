"""What the block pools ask about the order in which blocks go. Answered by the retention."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from sessionkv.types import BlockHash, Tier

UNRETAINED, RETAINED, EXPECTED, PINNED = 0, 1, 2, 3
"""Ranks; a pin's priority (0 and up) is added to the last."""


class RetentionView(Protocol):
    """Ranks blocks by what sessions want kept. Questions are cheap and change nothing."""

    def rank(self, key: BlockHash, tier: Tier) -> int:
        """How late the block leaves ``tier``: 0 not retained, 1 retained, 2 expected, 3 pinned.

        Blocks of a lower rank go first. A rank may rise at any time: it is asked for again when the
        block is about to go.
        """
        ...

    def take_fallen(self) -> Iterable[BlockHash]:
        """Keys whose rank may have fallen in any tier since the last call, each once."""
        ...


class Unretained:
    """No block is retained: plain least-recently-used order."""

    def rank(self, key: BlockHash, tier: Tier) -> int:
        """Always 0."""
        return 0

    def take_fallen(self) -> Iterable[BlockHash]:
        """None ever."""
        return ()
