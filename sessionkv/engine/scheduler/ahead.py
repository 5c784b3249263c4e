"""Which sequences a step continues that is planned before the step in flight has ended.

Decides and reserves room; plans nothing itself. What may go wrong by planning early is said in
:meth:`~sessionkv.engine.scheduler.scheduler.Scheduler.schedule_ahead`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sessionkv.engine.scheduler.sequence import Sequence, SequenceState


def continued(
    running: Iterable[Sequence], reserve: Callable[[Sequence, int], bool]
) -> list[Sequence] | None:
    """Sequences that go on with the token that the step in flight samples for them.

    Args:
        running: Those that hold blocks and have not ended, first in rank first.
        reserve: Grows a sequence's table to so many positions; False where there is no room.

    Returns:
        All that do not end with that token by their limit; None where one of them fetches, has
        more of its prompt to compute, is not in flight, or has no room. Tables that had grown by
        then stay so: the same positions are needed the next time.
    """
    going_on = []
    for sequence in running:
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
