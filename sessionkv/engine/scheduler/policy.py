"""What the scheduler asks of the load planner: fetch what was found in lower tiers, or compute."""

from __future__ import annotations

from typing import Protocol

from sessionkv.types import Match


class LoadDecision(Protocol):
    """Which tiers below the device to fetch from, and why not where not."""

    @property
    def use_host(self) -> bool:
        """Fetch what the host tier has."""
        ...

    @property
    def use_disk(self) -> bool:
        """Fetch what the disk tier has."""
        ...

    @property
    def reason(self) -> object:
        """For the cache report; opaque to the scheduler."""
        ...


class LoadPolicy(Protocol):
    """Decides once for each admission that found something below the device."""

    def decide(self, match: Match, num_prompt_tokens: int, queued_tokens: int) -> LoadDecision:
        """Fetch or compute, whichever is sooner.

        Args:
            match: What was found, by tier.
            num_prompt_tokens: Tokens of the sequence in all.
            queued_tokens: Tokens of sequences that wait behind it: computing makes them wait.
        """
        ...
