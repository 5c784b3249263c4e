"""Which sequences a step continues that is planned before the step in flight has ended.

Decides and reserves room; plans nothing itself. What may go wrong by planning early is said in
:meth:`~sessionkv.engine.scheduler.scheduler.Scheduler.schedule_ahead`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

from sessionkv.engine.scheduler.policy import Claims
from sessionkv.engine.scheduler.sequence import Sequence, SequenceState
from sessionkv.types import Meeting


def continued(
    running: Iterable[Sequence], reserve: Callable[[Sequence, int], bool]
) -> list[Sequence] | None:
    """Sequences that go on with the token that the step in flight samples for them.

    Args:
        running: Those that hold blocks and have not ended, first in rank first.
        reserve: Grows a sequence's table to so many positions; False where there is no room.

    Returns:
        All that do not end with that token by their limit; None where one of them has something to
        decide about its loads, has more of its prompt to compute, is not in flight, or has no room.
        Those that only wait for their loads are passed over. Tables that had grown by then stay so:
        the same positions are needed the next time.
    """
    going_on = []
    for sequence in running:
        if sequence.awaits_loads and not sequence.num_in_flight:
            continue
        known = len(sequence.token_ids)
        samples = sequence.num_in_flight and sequence.num_staged == known
        if not samples or sequence.state is not SequenceState.RUNNING:
            return None
        if known + 1 - sequence.num_prompt_tokens >= sequence.max_output_tokens:
            continue
        if known + 1 > sequence.capacity_tokens and not reserve(sequence, known + 1):
            return None
        going_on.append(sequence)
    return going_on


def num_awaited(meeting: Meeting, claims: Claims, block_size: int) -> int:
    """Blocks on their way to a sequence of which all will have been claimed; else 0.

    Until these are answered nothing can change for it. While something is unclaimed the policy is
    asked again, also without an answer.
    """
    front = -(-meeting.front_tokens // block_size)
    for tier, positions in meeting.unclaimed.items():
        if len(positions) - bisect_left(positions, front) > claims.loads.get(tier, 0):
            return 0
    return sum(meeting.loading.values()) + sum(claims.loads.values())
