"""The thread that owns the journal's transactions: group commit, answers in order.

All commits that wait when a transaction can start share it, so the cost of making them durable is
shared too.

Invariants: commits become durable in the order they were submitted; once one is refused, every
commit that was submitted before the submitter took notice (:meth:`JournalThread.accept_again`) is
refused as well, since it may stand on the refused one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sessionkv.errors import Overloaded, StoreError, StoreUnavailable
from sessionkv.store.answers import Answers, Committed
from sessionkv.store.gates import Gates
from sessionkv.store.journal import Journal
from sessionkv.types import JournalOp

_log = logging.getLogger(__name__)

MAX_WAITING = 16_384
_MAX_GROUP = 1024


@dataclass(frozen=True, slots=True)
class _Waiting:
    ticket: int
    ops: Sequence[JournalOp]
    epoch: int


class JournalThread:
    """Owns a journal from :meth:`start` to :meth:`close`."""

    def __init__(self, journal: Journal, inbox: Answers, gates: Gates) -> None:
        """Prepare; nothing runs yet."""
        self._journal = journal
        self._inbox = inbox
        self._gates = gates
        self._changed = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._closing = False
        # Failures so far, the failures that the submitter knows of, and which ticket was which.
        self._epoch = 0
        self._known_epoch = 0
        self._failures: dict[int, int] = {}
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

    def accept_again(self, ticket: int) -> None:
        """The submitter took back everything from the refused ``ticket`` on. Harmless otherwise."""
        with self._changed:
            self._known_epoch = self._failures.pop(ticket, self._known_epoch)

    def close(self, deadline_s: float) -> int | None:
        """Commit what waits until ``deadline_s`` (monotonic), refuse the rest.

        Returns:
            Number of commits refused; None when the thread does not end (a disk that hangs).
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        with self._changed:
            left = list(self._waiting)
            self._waiting.clear()
        for item in left:
            self._inbox.put(Committed(item.ticket, StoreUnavailable("the store is closed")))
        # One transaction more at most: the queue is empty.
        self._thread.join(1.0)
        return None if self._thread.is_alive() else len(left)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                count = min(len(self._waiting), _MAX_GROUP)
                group = [self._waiting.popleft() for _ in range(count)]
            self._commit(group)

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
            stale = StoreUnavailable("an earlier change could not be stored")
            self._inbox.put(Committed(item.ticket, stale))
            return
        error = self._try([item.ops])
        self._gates.pass_through("after_commit")
        if error is not None:
            with self._changed:
                self._epoch += 1
                self._failures[item.ticket] = self._epoch
        self._inbox.put(Committed(item.ticket, error))

    def _try(self, batches: list[Sequence[JournalOp]]) -> StoreError | None:
        try:
            self._journal.commit(batches)
        except StoreError as error:
            return error
        except Exception as error:  # noqa: BLE001 the thread must live to answer the others
            _log.exception("a commit failed in an unforeseen way")
            return StoreError(f"the journal failed: {error!r}")
        return None
