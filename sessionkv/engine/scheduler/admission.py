"""Which waiting sequence gets blocks now, from which tier, and which one had better wait.

A sequence waits for the store to say what disk has (``LOOKUP``), for another one that is computing
its next block, for a transfer that is loading it, or for room. All of these are bounded, and none
holds blocks meanwhile.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping

from sessionkv.engine.scheduler.kv import KVCache
from sessionkv.engine.scheduler.queue import WaitingQueue
from sessionkv.engine.scheduler.sequence import Sequence, SequenceState, Wait
from sessionkv.engine.scheduler.transfers import TransferDesk
from sessionkv.types import Admission, DiskQuery, DiskReceipt, Match

MAX_IDLE_WAIT_STEPS = 16
"""Steps without progress after which a sequence stops waiting for the one that fills its block."""

PATIENCE_S = 0.5
"""For so long others may be admitted past a sequence that finds no room; then they wait too."""

MOST_BLOCKS = 512
"""Blocks for which room is made, or whose loads are begun, for one sequence at a time while others
compute: about a millisecond of core, and twenty of a bus."""

_MAX_TRIES_PER_STEP = 4
_NOTHING_CACHED = Match(0, 0, 0)


class Tried(enum.Enum):
    """What came of trying to admit a sequence.

    ``ADMITTED``: it is out of the queue. ``WAITS``: it is noted what for. ``MAKES_ROOM``: part of
    what it needs was made free; those behind it are not to take that. ``COMPUTES``: it has nothing
    to load, and only a step that is being planned may admit it.
    """

    ADMITTED = enum.auto()
    WAITS = enum.auto()
    MAKES_ROOM = enum.auto()
    COMPUTES = enum.auto()


class Admitter:
    """Admission of waiting sequences; the scheduler decides when and keeps the running ones."""

    def __init__(
        self,
        kv: KVCache,
        *,
        queue: WaitingQueue,
        desk: TransferDesk,
        sequences: Mapping[int, Sequence],
        patience_s: Callable[[int, int], float],
    ) -> None:
        """Nobody waits yet.

        Args:
            kv: Gives blocks.
            queue: Of those that wait; their lifecycle's.
            desk: Takes receipts back.
            sequences: All by id; their lifecycle's.
            patience_s: How long to wait for what the store says of some positions of a prompt.
        """
        self._kv = kv
        self._queue = queue
        self._desk = desk
        self._sequences = sequences
        self._patience_s = patience_s
        self._questions: list[tuple[int, DiskQuery]] = []
        self._lookups: dict[int, float] = {}  # when each is given up
        self._waiters: set[int] = set()
        self._epoch = 0
        self._queue_version = 0
        self._settled: tuple[int, int] | None = None
        self._last_admission_at: float | None = None
        self._interval_s = 1.0

    @property
    def retry_after_s(self) -> float:
        """About when the queue will be one shorter: the smoothed time between admissions."""
        return min(30.0, max(0.05, self._interval_s))

    def room_changed(self) -> None:
        """Blocks may have become available: those that found no room are worth another try."""
        self._epoch += 1

    # ---- looking up on disk --------------------------------------------------------------

    def entered(self, sequence: Sequence, now: float) -> None:
        """A sequence came into the queue; ask the store where its chain leaves RAM."""
        self._queue_version += 1
        if sequence.reads_cache:
            sequence.ram_tokens = self._whole_blocks(sequence)
            self._look_up(sequence, now)

    def returned(self, sequence: Sequence) -> None:
        """A sequence that held blocks is back in the queue."""
        self._queue_version += 1
        self.room_changed()
        sequence.ram_tokens = self._whole_blocks(sequence) if sequence.reads_cache else 0

    def left(self, sequence: Sequence) -> None:
        """It is out of the queue, admitted or not."""
        self._lookups.pop(sequence.seq_id, None)
        self._waiters.discard(sequence.seq_id)
        sequence.wait = None
        sequence.blocked_since = None

    def _whole_blocks(self, sequence: Sequence) -> int:
        """Most tokens that full blocks could give it; the last token is always computed."""
        size = self._kv.block_size
        return (len(sequence.token_ids) - 1) // size * size

    def _look_up(self, sequence: Sequence, now: float) -> bool:
        query = self._kv.disk_query(sequence.chain)
        if query is None:
            return False
        if self._desk.disk_is_late:
            sequence.disk_was_late = True
            return False
        self._desk.give_back(sequence.receipt)
        sequence.receipt = None
        sequence.ram_tokens = query.first_token
        sequence.asked_at = query.num_moves
        sequence.state = SequenceState.LOOKUP
        # A disk that did not answer in time is not waited for that long again.
        first = len(sequence.token_ids) if sequence.disk_was_late else query.first_token
        patience_s = self._patience_s(first, len(sequence.token_ids))
        self._lookups[sequence.seq_id] = now + patience_s
        self._questions.append((sequence.seq_id, query))
        return True

    def take_lookups(self) -> list[tuple[int, DiskQuery]]:
        """Questions for the store, each once."""
        taken, self._questions = self._questions, []
        return taken

    def take_receipt(self, sequence: Sequence, receipt: DiskReceipt | None) -> bool:
        """Whether the answer is of use; late ones still are as long as the sequence waits."""
        if sequence.state is SequenceState.LOOKUP:
            self._end_lookup(sequence)
        elif sequence.state is not SequenceState.WAITING or sequence.receipt is not None:
            return False
        if receipt is None:
            return False
        sequence.disk_was_late = False
        sequence.receipt = receipt  # an empty one says that disk has no more
        return True

    def end_lookups(self, now: float) -> None:
        """Sequences whose look-up takes too long go on without disk."""
        for seq_id in [seq_id for seq_id, until in self._lookups.items() if until <= now]:
            sequence = self._sequences[seq_id]
            sequence.disk_was_late = True
            self._end_lookup(sequence)

    def _end_lookup(self, sequence: Sequence) -> None:
        del self._lookups[sequence.seq_id]
        sequence.state = SequenceState.WAITING
        self._queue_version += 1

    def next_lookup_end(self) -> float | None:
        """When :meth:`end_lookups` next has something to do."""
        return min(self._lookups.values(), default=None)

    # ---- choosing ------------------------------------------------------------------------

    def candidates(self, now: float, step_id: int) -> Iterator[Sequence]:
        """Sequences worth trying to admit, best first; each is to be passed to :meth:`admit`.

        Free of charge while nothing has changed since nobody could be admitted.
        """
        if self.is_settled(step_id):
            return
        version = (self._epoch, self._queue_version)
        ready = [
            sequence
            for sequence in self._queue
            if sequence.state is SequenceState.WAITING and not self._still_waits(sequence, step_id)
        ]
        tries = 0
        for sequence in self._queue.in_turn(ready, now):
            if sequence.tried_epoch != self._epoch:
                if tries == _MAX_TRIES_PER_STEP:
                    return
                yield sequence
            if sequence.tried_epoch == self._epoch and sequence.blocked_since is not None:
                tries += 1
                if now - sequence.blocked_since >= PATIENCE_S:
                    break
        self._settled = version

    def is_settled(self, step_id: int) -> bool:
        """Whether nothing has changed since nobody could be admitted."""
        return self._settled == (self._epoch, self._queue_version) and all(
            self._still_waits(self._sequences[seq_id], step_id) for seq_id in self._waiters
        )

    def _still_waits(self, sequence: Sequence, step_id: int) -> bool:
        wait = sequence.wait
        if wait is None:
            return False
        if wait.transfer_id is not None:
            return self._desk.is_under_way(wait.transfer_id)
        filler = wait.filler
        return (
            filler is not None
            and filler.fills_blocks
            and filler.progress <= wait.progress
            and step_id - wait.since_step < MAX_IDLE_WAIT_STEPS
        )

    def _should_wait(self, sequence: Sequence, match: Match, step_id: int) -> bool:
        """Whether its next block is on its way already, by a transfer or another sequence."""
        transfer_id = match.waits_for_transfer
        if transfer_id is not None and self._desk.is_under_way(transfer_id):
            sequence.wait = Wait(transfer_id=transfer_id)
            return True
        filler = self._sequences.get(match.waits_for) if match.waits_for is not None else None
        if filler is None or not filler.fills_blocks:
            return False
        wait = sequence.wait
        if wait is None or wait.filler is not filler or filler.progress > wait.progress:
            sequence.wait = Wait(filler, None, filler.progress, step_id)
            return True
        return step_id - wait.since_step < MAX_IDLE_WAIT_STEPS

    # ---- admitting -----------------------------------------------------------------------

    def admit(
        self,
        sequence: Sequence,
        now: float,
        step_id: int,
        *,
        most_blocks: int | None,
        alone: bool = False,
    ) -> Tried:
        """Give a sequence its blocks, or note what it waits for.

        Args:
            sequence: One of :meth:`candidates`.
            now: Time of the caller's clock.
            step_id: Of the step being planned.
            most_blocks: For so many room is made at once; None where nobody waits meanwhile.
            alone: Nothing else holds blocks, so that what has no room now never will have.
        """
        match = self._match(sequence)
        if (waits := self._put_off(sequence, match, now, step_id)) is not None:
            return waits
        if most_blocks is not None and not self._make_room(sequence, match, most_blocks):
            return Tried.MAKES_ROOM
        return self._take_blocks(sequence, match, now, alone=alone)

    def admit_beside(
        self, sequence: Sequence, now: float, step_id: int, *, most_blocks: int
    ) -> Tried:
        """As :meth:`admit` while a step is in flight: if some of it can be loaded.

        Where it has found no room it is tried again when all copies have ended that were then under
        way to make some.
        """
        if sequence.awaited_spills is not None:
            sequence.awaited_spills &= self._desk.spills
            if sequence.awaited_spills:
                return self._outcome(sequence, None, _NOTHING_CACHED, now)
            sequence.awaited_spills = None
        match = self._match(sequence)
        if match.num_tokens == match.device_tokens:
            return Tried.COMPUTES
        if (waits := self._put_off(sequence, match, now, step_id)) is not None:
            return waits
        if not self._make_room(sequence, match, most_blocks):
            return Tried.MAKES_ROOM
        admission = self._lease(sequence, match)
        if admission is None:
            self._desk.collect_spills()
            if not self._desk.spills:
                return self._take_blocks(sequence, self._match(sequence), now, alone=False)
            sequence.awaited_spills = set(self._desk.spills)
        return self._outcome(sequence, admission, match, now)

    def _put_off(self, sequence: Sequence, match: Match, now: float, step_id: int) -> Tried | None:
        """Whether it had better wait, for others or for what the store says."""
        if sequence.reads_cache and self._should_wait(sequence, match, step_id):
            self._waiters.add(sequence.seq_id)
            return Tried.WAITS
        return Tried.WAITS if self._asks_again(sequence, match, now) else None

    def _make_room(self, sequence: Sequence, match: Match, most_blocks: int) -> bool:
        known = len(sequence.token_ids)
        return self._kv.make_room(sequence.chain, match, room_tokens=known, most_blocks=most_blocks)

    def _take_blocks(self, sequence: Sequence, match: Match, now: float, *, alone: bool) -> Tried:
        admission = self._lease(sequence, match)
        if admission is None:
            # Planning the spills may itself drop what is clean, even what was matched.
            self._desk.collect_spills()
            match = self._match(sequence)
            if self._asks_again(sequence, match, now):
                return Tried.WAITS
            admission = self._lease(sequence, match)
        if admission is None and alone and not self._desk.spills:
            # Holding what is matched can itself take the room that is missing (a tail is copied
            # while its source is leased): then everything is computed.
            match = _NOTHING_CACHED
            admission = self._lease(sequence, match)
        return self._outcome(sequence, admission, match, now)

    def _outcome(
        self, sequence: Sequence, admission: Admission | None, match: Match, now: float
    ) -> Tried:
        if admission is not None:
            self._admitted(sequence, admission, match, now)
            return Tried.ADMITTED
        sequence.tried_epoch = self._epoch
        if sequence.blocked_since is None:
            sequence.blocked_since = now
        return Tried.WAITS

    def _asks_again(self, sequence: Sequence, match: Match, now: float) -> bool:
        """Ask disk anew where memory has lost some of the prompt since: each time there is less."""
        if not sequence.reads_cache:
            return False
        lost = match.num_tokens < sequence.ram_tokens
        if lost:
            sequence.ram_tokens = match.num_tokens
        return (lost or match.moved_down_at > sequence.asked_at) and self._look_up(sequence, now)

    def _match(self, sequence: Sequence) -> Match:
        if not sequence.reads_cache:
            return _NOTHING_CACHED
        # What a disk that hangs were to load would keep its blocks from everybody.
        receipt = None if self._desk.disk_is_late else sequence.receipt
        return self._kv.match(sequence.chain, receipt)

    def _lease(self, sequence: Sequence, match: Match) -> Admission | None:
        """Lease what is matched, with room for the whole prompt; all or nothing."""
        known = len(sequence.token_ids)
        return self._kv.admit(sequence.seq_id, sequence.chain, match, room_tokens=known)

    def _admitted(self, sequence: Sequence, admission: Admission, match: Match, now: float) -> None:
        self._queue.remove(sequence)
        self.left(sequence)
        sequence.capacity_tokens = len(admission.block_ids) * self._kv.block_size
        sequence.holds_blocks = True
        sequence.num_computed = sequence.num_staged = admission.device_tokens
        sequence.found_tokens = admission.found_tokens
        sequence.copies = admission.copies
        sequence.awaited_spills = sequence.held_back = None
        sequence.accounting.admitted(now, match)
        if admission.found_tokens > admission.device_tokens:
            sequence.state = SequenceState.FETCHING
        else:
            sequence.state = SequenceState.RUNNING
            sequence.accounting.is_ready(now)
            self._desk.give_back(sequence.receipt)
            sequence.receipt = None
        if self._last_admission_at is not None:
            self._interval_s += (now - self._last_admission_at - self._interval_s) / 8
        self._last_admission_at = now
