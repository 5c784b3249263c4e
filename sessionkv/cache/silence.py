"""Lower tiers that owe answers to copies and have given none for long.

A copy down is worth waiting for only while its tier answers. One that hangs counts as refusing, so
that blocks are dropped as after a failed copy, until the next answer of whatever kind. Knows
neither blocks nor a clock: times are arguments.
"""

from __future__ import annotations

from collections.abc import Collection

from sessionkv.types import Tier

SILENCE_S = 2.0
"""A transfer is at most some tens of MB, which slow disks take in a second; computing what is lost
seldom costs those who wait for room more than waiting longer."""


class Silence:
    """Since when each lower tier has been owing an answer.

    Attributes:
        tiers: Those that count as refusing; read by whoever offers blocks to them.
    """

    def __init__(self) -> None:
        self.tiers: set[Tier] = set()
        self._since: dict[Tier, float] = {}

    def heard(self, tier: Tier) -> None:
        """A tier has answered something: it is used again."""
        self.tiers.discard(tier)
        self._since.pop(tier, None)

    def listen(self, owing: Collection[Tier], now: float) -> set[Tier]:
        """Those of the tiers owing answers that count as refusing from now on."""
        begun = {
            tier
            for tier in owing
            if tier not in self.tiers and now - self._since.setdefault(tier, now) >= SILENCE_S
        }
        self.tiers |= begun
        return begun
