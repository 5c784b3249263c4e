"""Every sequence the scheduler knows, and the only ways from one state to the next.

::

    LOOKUP -> WAITING -> FETCHING -> RUNNING -> FINISHED -> (released)
       ^         ^___________|__________|            any state -> (dropped)
       |_________|   preempted or rolled back

A sequence is FETCHING from its admission until everything found of its prompt is there or computed;
steps may compute its front meanwhile.

Leases, the share it counts for, its disk receipt and the runner's knowledge of it end in one place
each, whatever the path. Plans nothing.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable

from sessionkv.engine.scheduler.admission import Admitter
from sessionkv.engine.scheduler.fairness import FairShares
from sessionkv.engine.scheduler.kv import KVCache
from sessionkv.engine.scheduler.queue import WaitingQueue
from sessionkv.engine.scheduler.sequence import Sequence, SequenceEvent, SequenceState
from sessionkv.engine.scheduler.transfers import TransferDesk
from sessionkv.errors import TurnFailed
from sessionkv.types import SampledToken


class Lifecycle:
    """Sequences by id, by rank and in the queue.

    Attributes:
        sequences: All that are known, by id.
        running: Those that hold blocks and have not finished, first in rank first.
        queue: Those that hold none.
        num_unreleased: Finished ones that still hold blocks.
        num_constrained: Those known that have a constraint.
    """

    def __init__(
        self,
        kv: KVCache,
        *,
        desk: TransferDesk,
        ageing_s: float,
        patience_s: Callable[[int, int], float],
    ) -> None:
        """Nothing is known yet; ``patience_s`` is the admitter's."""
        self._kv = kv
        self._desk = desk
        self.sequences: dict[int, Sequence] = {}
        self.running: list[Sequence] = []
        self.queue = WaitingQueue(ageing_s=ageing_s)
        self.admitter = Admitter(
            kv, queue=self.queue, desk=desk, sequences=self.sequences, patience_s=patience_s
        )
        self.num_unreleased = 0
        self.num_constrained = 0
        self._shares = FairShares()
        self._ends: list[int] = []
        self._deadlines: list[tuple[float, int]] = []
        self._num_entered = 0
        self._num_admitted = 0

    def enter(self, sequence: Sequence, now: float) -> None:
        """A new sequence joins the end of the queue."""
        sequence.accounting.added_at = now
        self._num_entered += 1
        sequence.arrival = self._num_entered
        sequence.share = self._shares.join(sequence.group)
        self.sequences[sequence.seq_id] = sequence
        self.num_constrained += sequence.constraint is not None
        self.queue.add(sequence)
        self.admitter.entered(sequence, now)
        if sequence.deadline is not None:
            heapq.heappush(self._deadlines, (sequence.deadline, sequence.seq_id))

    def admitted(self, sequence: Sequence) -> None:
        """It got its first blocks; it is the last of its priority to keep them."""
        self._num_admitted += 1
        sequence.admission_number = self._num_admitted
        insort(self.running, sequence, key=lambda s: s.rank)

    def joined(self, sequence: Sequence) -> None:
        """Loaded blocks lie behind its front: for the runner it starts anew, with all of them."""
        self._leave_batch(sequence)

    def fetched(self, sequence: Sequence, now: float) -> None:
        """Nothing is to be loaded for it any more."""
        sequence.state = SequenceState.RUNNING
        sequence.accounting.is_ready(now)
        self._give_back_receipt(sequence)

    def preempt_last(self) -> None:
        """The last in rank gives up its blocks, to be demoted, and waits to go on."""
        victim = self.running.pop()
        self._kv.preempt(victim.seq_id)
        victim.holds_blocks = False
        self._note_computed(victim)
        self._return_to_queue(victim)

    def go_on_without_disk(self, sequence: Sequence) -> None:
        """Its reads from disk are not waited for any longer: it is admitted anew, without them.

        What it has computed stays as cache. To be called while no step is in flight.
        """
        sequence.disk_was_late = True
        self._give_back_receipt(sequence)
        self._note_computed(sequence)
        self.roll_back(sequence)

    def _note_computed(self, sequence: Sequence) -> None:
        if sequence.num_known_blocks:
            sequence.computed_before = max(sequence.computed_before, sequence.num_computed)

    def roll_back(self, sequence: Sequence) -> None:
        """What it read turned out bad: it waits to be admitted again."""
        self.running.remove(sequence)
        self.end_leases(sequence)
        self._return_to_queue(sequence)

    def _return_to_queue(self, sequence: Sequence) -> None:
        if not sequence.computed_before:
            sequence.accounting.undo_admission()
        self._leave_batch(sequence)
        sequence.leave_device()
        sequence.state = SequenceState.WAITING
        sequence.resumed = True
        self.queue.add(sequence)
        self.admitter.returned(sequence)

    def finish(
        self, sequence: Sequence, token: SampledToken | None, stop_token_id: int | None = None
    ) -> SequenceEvent:
        """It runs no more; its blocks stay leased until :meth:`release`."""
        self._leave_place(sequence)
        self._leave_batch(sequence)
        sequence.state = SequenceState.FINISHED
        sequence.num_kept_output_tokens = min(
            sequence.num_output_tokens, sequence.max_output_tokens
        )
        self._give_back_receipt(sequence)
        self._trim_deadlines()
        self.num_unreleased += 1
        return SequenceEvent(
            sequence.seq_id,
            token,
            sequence.num_kept_output_tokens,
            sequence.end_reason,
            stop_token_id,
        )

    def release(self, sequence: Sequence, keep_tokens: int | None) -> None:
        """Forget a finished sequence."""
        self.num_unreleased -= 1
        self._forget(sequence)
        self.end_leases(sequence, keep_tokens)

    def fail(self, sequence: Sequence, reason: str) -> SequenceEvent:
        """It cannot be computed: forget it at once."""
        self._leave_place(sequence)
        self._forget(sequence)
        self.end_leases(sequence)
        sequence.state = SequenceState.FINISHED
        error = TurnFailed(f"the turn could not be computed: {reason}")
        return SequenceEvent(sequence.seq_id, None, sequence.num_output_tokens, error=error)

    def drop(self, sequence: Sequence) -> None:
        """Nobody wants it any more."""
        if sequence.state is SequenceState.FINISHED:
            self.num_unreleased -= 1
        else:
            self._leave_place(sequence)
        self._forget(sequence)
        sequence.state = SequenceState.FINISHED
        self.end_leases(sequence)

    def end_leases(self, sequence: Sequence, keep_tokens: int | None = None) -> None:
        """Give up its blocks, if it has any; written ones stay as cache.

        Steps in flight still read and write them: then they go when the last of those was
        collected, by :meth:`landed`.
        """
        self._leave_batch(sequence)
        if sequence.num_in_flight:
            sequence.leaves, sequence.keep_tokens = True, keep_tokens
        elif sequence.holds_blocks:
            self._kv.finish(sequence.seq_id, keep_tokens)
            sequence.holds_blocks = False
            self.admitter.room_changed()

    def landed(self, sequence: Sequence) -> None:
        """A step in flight computed it for nothing: it had ended, or gone back to the queue."""
        if sequence.leaves and not sequence.num_in_flight:
            sequence.leaves = False
            self.end_leases(sequence, sequence.keep_tokens)

    def take_ends(self) -> tuple[int, ...]:
        """Sequences the runner may forget, each once for every start."""
        ends = tuple(self._ends)
        self._ends.clear()
        return ends

    def _leave_batch(self, sequence: Sequence) -> None:
        if sequence.started:
            self._ends.append(sequence.seq_id)
            sequence.started = False

    def _leave_place(self, sequence: Sequence) -> None:
        if sequence.state in (SequenceState.LOOKUP, SequenceState.WAITING):
            self.queue.remove(sequence)
            self.admitter.left(sequence)
        else:
            self.running.remove(sequence)

    def _forget(self, sequence: Sequence) -> None:
        del self.sequences[sequence.seq_id]
        self.num_constrained -= sequence.constraint is not None
        self._shares.leave(sequence.share)
        self._give_back_receipt(sequence)
        self._trim_deadlines()

    def _give_back_receipt(self, sequence: Sequence) -> None:
        if sequence.receipt is not None:
            self._desk.give_back(sequence.receipt)
            sequence.receipt = None

    # ---- deadlines -----------------------------------------------------------------------

    def expired(self, now: float) -> list[int]:
        """Sequences that go on past their deadline. O(1) when there are none."""
        if not self._deadlines or self._deadlines[0][0] > now:
            return []
        return [
            seq_id
            for deadline, seq_id in sorted(self._deadlines)
            if deadline <= now and self._goes_on(seq_id)
        ]

    def next_deadline(self) -> float | None:
        """The earliest deadline of a sequence that goes on."""
        return self._deadlines[0][0] if self._deadlines else None

    def _goes_on(self, seq_id: int) -> bool:
        sequence = self.sequences.get(seq_id)
        return sequence is not None and sequence.state is not SequenceState.FINISHED

    def _trim_deadlines(self) -> None:
        """Drop passed-by entries, so that the first one is always of a sequence that goes on."""
        while self._deadlines and not self._goes_on(self._deadlines[0][1]):
            heapq.heappop(self._deadlines)
