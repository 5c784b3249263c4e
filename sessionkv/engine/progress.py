"""How far prompts are, for the turns that asked to hear of it.

One note when a sequence is admitted, which comes before any token of it; then further ones, at most
every half second, until its first token. Others cost nothing. Core thread only.
"""

from __future__ import annotations

from dataclasses import dataclass

from sessionkv.engine.messages import TurnProgress
from sessionkv.engine.scheduler.sequence import Sequence, SequenceState

_INTERVAL_S = 0.5
"""Often enough for a person who waits and for connections that must not be idle."""


@dataclass(slots=True)
class _Told:
    """What was last said of a sequence; ``admitted_at`` is of the admission it was said of."""

    sequence: Sequence
    admitted_at: float | None = None
    at_s: float = 0.0
    done_tokens: int = 0


class ProgressDesk:
    """The sequences that somebody watches on their way through their prompts."""

    def __init__(self, block_size: int) -> None:
        """Nobody is watched yet."""
        self._block_size = block_size
        self._watched: list[_Told] = []

    def watch(self, sequence: Sequence) -> None:
        """Report on a sequence that was handed to the scheduler, until its first token or end."""
        self._watched.append(_Told(sequence))

    def due(self, now: float) -> list[TurnProgress]:
        """What is to be said now, each once. O(watched)."""
        if not self._watched:
            return []
        self._watched = [told for told in self._watched if _is_on_its_way(told.sequence)]
        return [self._note(told, now) for told in self._watched if self._is_due(told, now)]

    def _is_due(self, told: _Told, now: float) -> bool:
        admitted_at = told.sequence.accounting.admitted_at
        if admitted_at is None:
            return False
        if told.admitted_at != admitted_at:
            return True
        return now - told.at_s >= _INTERVAL_S and self._done(told.sequence) > told.done_tokens

    def _note(self, told: _Told, now: float) -> TurnProgress:
        sequence = told.sequence
        told.admitted_at, told.at_s = sequence.accounting.admitted_at, now
        told.done_tokens = max(told.done_tokens, self._done(sequence))
        device, host, disk = sequence.accounting.found
        return TurnProgress(
            sequence.seq_id, sequence.num_prompt_tokens, device, host, disk, told.done_tokens
        )

    def _done(self, sequence: Sequence) -> int:
        """Positions below the front, and what was loaded behind it."""
        accounting = sequence.accounting
        joined = accounting.host_tokens + accounting.disk_tokens
        behind = max(0, sequence.num_arrived * self._block_size - joined)
        return min(sequence.num_computed + behind, sequence.num_prompt_tokens)


def _is_on_its_way(sequence: Sequence) -> bool:
    is_over = sequence.state is SequenceState.FINISHED
    return not is_over and sequence.accounting.first_token_at is None
