"""What the scheduler asks of the load planner: which blocks to load now, how far to compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sessionkv.types import Meeting, Tier


@dataclass(frozen=True, slots=True)
class Lane:
    """Loads from one tier that are under way, of all sequences; they are answered in order.

    Attributes:
        num_blocks: How many blocks.
        head_blocks: Blocks of the transfer that is next to be answered.
        head_s: For how long it has been that.
    """

    num_blocks: int = 0
    head_blocks: int = 0
    head_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """What else bears on one sequence's meeting.

    Attributes:
        num_tokens: Tokens of the sequence in all.
        step_tokens: Most tokens of one step, as things are.
        other_tokens: Tokens that other sequences have to compute: computing makes them wait.
        lanes: Loads under way, by tier.
    """

    num_tokens: int
    step_tokens: int
    other_tokens: int = 0
    lanes: Mapping[Tier, Lane] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Claims:
    """What the two cursors of one sequence take now.

    Attributes:
        compute_tokens: Positions below it are computed, as far as one step goes; None for no bound.
        loads: By tier, how many of its unclaimed blocks to load, from the back.
    """

    compute_tokens: int | None
    loads: Mapping[Tier, int] = field(default_factory=dict)

    def bounded(self, most_blocks: int) -> Claims:
        """With at most so many loads; itself where it has no more."""
        if sum(self.loads.values()) <= most_blocks:
            return self
        loads: dict[Tier, int] = {}
        for tier, count in self.loads.items():
            loads[tier] = min(count, most_blocks - sum(loads.values()))
        return Claims(self.compute_tokens, {tier: n for tier, n in loads.items() if n})

    def without(self, begun: Claims) -> Claims:
        """What is left of these when the loads of others, of at most as many blocks, are begun."""
        left = {tier: n - begun.loads.get(tier, 0) for tier, n in self.loads.items()}
        return Claims(self.compute_tokens, {tier: n for tier, n in left.items() if n})


class LoadPolicy(Protocol):
    """Decides how long to ask for a sequence's KV below the device, and what to load of it."""

    def patience_s(self, start: int, end: int, *, step_tokens: int) -> float:
        """How long an answer is worth waiting for that may spare computing these positions."""
        ...

    def meet(self, meeting: Meeting, work: Workload) -> Claims:
        """Share what is unclaimed between the cursors; see :class:`Claims`.

        No more is claimed of a tier than is unclaimed from the front on. Computing stops before
        what is loaded, whatever is asked for. While nothing at all is loading, something is claimed
        or the front goes on.
        """
        ...
