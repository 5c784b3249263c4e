"""The thread that owns the journal's transactions: group commit, questions, compaction.

All commits that wait when a transaction can start share it, so the cost of making them durable is
shared too. Questions that were asked among them are answered after it.

Invariants: commits become durable in the order they were submitted; a question is answered from a
journal that has every commit submitted before it, or has refused it, and answers of both kinds come
in the order of what they say; once a commit is refused, every commit that was submitted before the
submitter took notice (:meth:`JournalThread.accept_again`) is refused as well, since it may stand on
the refused one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sessionkv.errors import Overloaded, StoreError, StoreUnavailable
from sessionkv.store.answers import Answered, Answers, Committed
from sessionkv.store.full_disk import is_full
from sessionkv.store.gates import Gates
from sessionkv.store.journal import Journal
from sessionkv.store.journal_reads import JournalFigures
from sessionkv.store.questions import Question
from sessionkv.types import JournalOp

_log = logging.getLogger(__name__)

MAX_WAITING = 16_384
_MAX_GROUP = 1024
_LOOK_EVERY = 64
"""Commits between two looks at how much of the file holds nothing."""
_COPY_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class _Waiting:
    ticket: int
    ops: Sequence[JournalOp]
    epoch: int


@dataclass(frozen=True, slots=True)
class _Asked:
    ticket: int
    question: Question


class JournalThread:
    """Owns a journal from :meth:`start` to :meth:`close`.

    Attributes:
        figures: Of the journal after the latest group.
    """

    def __init__(
        self, journal: Journal, inbox: Answers, gates: Gates, make_room: Callable[[], bool]
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            journal: Owned from :meth:`start` on.
            inbox: Takes the answers.
            gates: Points where tests hold the thread.
            make_room: Asked when the disk is full, may wait; whether a second try is worth it.
        """
        self._journal = journal
        self._make_room = make_room
        self._inbox = inbox
        self._gates = gates
        self._changed = threading.Condition()
        self._waiting: deque[_Waiting | _Asked] = deque()
        self._closing = False
        self._has_ended = self._is_left = False
        self._unlooked = _LOOK_EVERY
        self.figures: JournalFigures = journal.figures()
        # Failures so far, the failures that the submitter knows of, and which ticket was which.
        self._epoch = 0
        self._known_epoch = 0
        self._failures: dict[int, int] = {}
        self._failure: StoreError | None = None
        self._thread = threading.Thread(target=self._run, name="store-journal", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, ticket: int, ops: Sequence[JournalOp]) -> None:
        """Queue one commit; answered by one :class:`Committed`.

        Raises:
            Overloaded: Too many are waiting; nothing was queued.
        """
        with self._changed:
            if self._closing:
                closed = StoreUnavailable("the store is closed")
                self._inbox.put(Committed(ticket, closed))
                return
            if len(self._waiting) >= MAX_WAITING:
                raise Overloaded(f"{MAX_WAITING} commits wait for the disk")
            self._waiting.append(_Waiting(ticket, ops, self._known_epoch))
            self._changed.notify()

    def ask(self, ticket: int, question: Question) -> None:
        """Queue one question; answered by one :class:`Answered`.

        Raises:
            Overloaded: Too many are waiting; nothing was queued.
        """
        with self._changed:
            if self._closing:
                closed = StoreUnavailable("the store is closed")
                self._inbox.put(Answered(ticket, None, closed))
                return
            if len(self._waiting) >= MAX_WAITING:
                raise Overloaded(f"{MAX_WAITING} commits and questions wait for the disk")
            self._waiting.append(_Asked(ticket, question))
            self._changed.notify()

    def accept_again(self, ticket: int) -> None:
        """The submitter took back everything from the refused ``ticket`` on. Harmless otherwise."""
        with self._changed:
            self._known_epoch = self._failures.pop(ticket, self._known_epoch)

    def close(self, deadline_s: float) -> int | None:
        """Commit what waits until ``deadline_s`` (monotonic), refuse the rest.

        Returns:
            Number of commits refused; None when the thread does not end (a disk that hangs): then
            it closes the journal itself, should it ever.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        with self._changed:
            left = list(self._waiting)
            self._waiting.clear()
        for item in left:
            closed = StoreUnavailable("the store is closed")
            if isinstance(item, _Asked):
                self._inbox.put(Answered(item.ticket, None, closed))
            else:
                self._inbox.put(Committed(item.ticket, closed))
        # One transaction more at most: the queue is empty.
        self._thread.join(1.0)
        dropped = sum(isinstance(item, _Waiting) for item in left)
        with self._changed:
            self._is_left = not self._has_ended
            return None if self._is_left else dropped

    def _run(self) -> None:
        self._work()
        with self._changed:
            self._has_ended = True
            if not self._is_left:
                return
        self._journal.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                patience_s = _COPY_POLL_S if self._journal.is_compacting else None
                self._changed.wait_for(lambda: self._waiting or self._closing, patience_s)
                if not self._waiting and self._closing:
                    return
                count = min(len(self._waiting), _MAX_GROUP)
                taken = [self._waiting.popleft() for _ in range(count)]
            group = [item for item in taken if isinstance(item, _Waiting)]
            if group:
                self._commit(group)
            for item in taken:
                if isinstance(item, _Asked):
                    self._answer(item)
            self._compact(len(group))

    def _answer(self, item: _Asked) -> None:
        try:
            answered = Answered(item.ticket, self._journal.answer(item.question))
        except StoreError as error:
            answered = Answered(item.ticket, None, error)
        except Exception as error:  # noqa: BLE001 the thread must live to answer the others
            _log.exception("a question to the journal failed in an unforeseen way")
            answered = Answered(item.ticket, None, StoreError(f"the journal failed: {error!r}"))
        self._inbox.put(answered)

    def _compact(self, num_commits: int) -> None:
        """Start a copy, or take one over, between groups."""
        journal = self._journal
        try:
            if journal.is_copied:
                self._gates.pass_through("before_swap")
                if journal.catch_up():
                    self._gates.pass_through("caught_up")
                    journal.swap()
                    self._gates.pass_through("after_swap")
            self._unlooked += num_commits
            if self._unlooked >= _LOOK_EVERY and not journal.is_compacting:
                self._unlooked = 0
                journal.compact_if_worth()
            self.figures = journal.figures()
        except Exception:  # noqa: BLE001 the thread must live to answer the others
            _log.exception("the journal could not be compacted")

    def _commit(self, group: list[_Waiting]) -> None:
        self._gates.pass_through("before_commit")
        if all(item.epoch == self._epoch for item in group):
            error = self._try([item.ops for item in group])
            self._gates.pass_through("after_commit")
            if error is None:
                for item in group:
                    self._inbox.put(Committed(item.ticket, None))
                return
        # Somewhere in the group is a failure, old or new: one by one, to refuse from there on.
        for item in group:
            self._commit_alone(item)

    def _commit_alone(self, item: _Waiting) -> None:
        if item.epoch != self._epoch:
            cause = self._failure
            stale = StoreUnavailable(
                f"an earlier change could not be stored: {cause}",
                retryable=cause is not None and cause.retryable,
            )
            self._inbox.put(Committed(item.ticket, stale))
            return
        error = self._try([item.ops])
        self._gates.pass_through("after_commit")
        if error is not None:
            self._failure = error
            with self._changed:
                self._epoch += 1
                self._failures[item.ticket] = self._epoch
        self._inbox.put(Committed(item.ticket, error))

    def _try(self, batches: list[Sequence[JournalOp]]) -> StoreError | None:
        try:
            try:
                self._journal.commit(batches)
            except StoreUnavailable as error:
                if not is_full(error.__cause__) or not self._make_room():
                    raise
                self._journal.commit(batches)
        except StoreError as error:
            return error
        except Exception as error:  # noqa: BLE001 the thread must live to answer the others
            _log.exception("a commit failed in an unforeseen way")
            return StoreError(f"the journal failed: {error!r}")
        return None
