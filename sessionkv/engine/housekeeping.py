"""What core does by itself between turns: lets run out what has run out, and keeps memory bounded.

Pins, unnamed sessions and idempotency keys run out; sessions that were not used for long leave
memory, those whose KV is in a tier of memory excepted: what eviction there and writing to disk go
by must be right for them. After a start the sessions that were pinned are taken in, a few at a
time, since a pin counts from when its session is in memory. Core thread only.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from itertools import islice

from sessionkv.cache.tree_heads import UNNAMED_TTL_S
from sessionkv.cache.turns import Change, HeadId
from sessionkv.engine.commits import Commits, PendingCommit
from sessionkv.engine.loading import Loader, Ready
from sessionkv.engine.messages import CallDone
from sessionkv.engine.parts import CoreParts
from sessionkv.engine.stats import unanswered
from sessionkv.engine.turns import TurnDesk
from sessionkv.errors import SessionKVError
from sessionkv.store.questions import Due, FindDue

_log = logging.getLogger(__name__)

MEMORY_BYTES = 64 * 1024**2
"""Turns in memory past this are let go, of the sessions used longest ago."""
_LOOKED_AT = 64
"""Sessions looked at in one round, to be let go."""
_LOADS = 32
"""Sessions that are asked for at once: requests must not wait behind them for long."""


@dataclass(frozen=True, slots=True)
class Chore:
    """Something that waits for the journal; comes back to :meth:`Housekeeping.serve`.

    Attributes:
        head: The unnamed session that has run out, or the pinned one that was taken in; None asks
            what has run out.
        pinned: Whether ``head`` was pinned.
    """

    head: HeadId | None = None
    pinned: bool = False


class Housekeeping:
    """Chores of one core."""

    def __init__(self, parts: CoreParts, commits: Commits, turns: TurnDesk, loader: Loader) -> None:
        self._parts = parts
        self._tree = parts.tree
        self._commits = commits
        self._turns = turns
        self._loader = loader
        self._pinned = deque(parts.pinned)
        self._asked_due = False
        self._due_left = 0
        self._more_is_due = False
        self._unanswered: frozenset[str] = frozenset()

    def tidy(self) -> None:
        """To be called often: cold sessions leave memory, pinned ones come in."""
        self._tell_unanswered()
        while self._pinned and len(self._loader) < _LOADS:
            head = self._pinned.popleft()
            self._loader.submit(Chore(head, pinned=True), (head,))
        if self._tree.num_bytes > MEMORY_BYTES:
            self._let_go()

    def _tell_unanswered(self) -> None:
        """Once when a tier hangs, and once when it answers again."""
        before, self._unanswered = self._unanswered, unanswered(self._parts)
        for what in sorted(self._unanswered - before):
            _log.warning(
                "%s are not answered: until they are, KV is dropped or computed instead", what
            )
        for what in sorted(before - self._unanswered):
            _log.warning("%s are answered again", what)

    def expire(self, wall: float) -> None:
        """To be called now and then: let fall off what has run out."""
        self._commit(self._tree.expire(wall))
        num_keys = self._parts.store.journal_figures().num_keys
        if self._tree.num_unnamed or num_keys:
            self._ask_due(wall)

    def _ask_due(self, wall: float) -> None:
        if self._asked_due or self._due_left:
            return
        self._asked_due = True
        limits = self._parts.config.limits
        asked = FindDue(
            unnamed_until_s=wall - UNNAMED_TTL_S,
            keep_unnamed=self._tree.max_unnamed,
            keys_until_s=wall - limits.idempotency_ttl_s,
            keep_keys=int(limits.idempotency_keys),
            limit=_LOADS,
        )
        self._loader.submit(Chore(), question=asked)

    def serve(self, chore: Chore, ready: Ready, wall: float) -> None:
        """The journal has answered."""
        if chore.head is None:
            self._asked_due = False
            if isinstance(ready.reply, Due):
                self._take_due(ready.reply, wall)
        elif chore.pinned:
            self.tidy()
        else:
            if ready.error is None and not self._turns.is_running(chore.head):
                self._commit(self._tree.expire(wall, (chore.head,)))
            self._due_left -= 1
            if self._more_is_due and not self._due_left:
                # The journal answers behind what was just deleted: it names others.
                self._ask_due(wall)

    def _take_due(self, due: Due, wall: float) -> None:
        """Keys go at once, sessions when they are in memory."""
        if due.keys:
            self._commit(self._tree.forget_keys(wall))
        self._due_left, self._more_is_due = len(due.heads), len(due.heads) >= _LOADS
        for head in due.heads:
            self._loader.submit(Chore(head), (head,))

    def _commit(self, change: Change | None) -> None:
        if change is not None:
            # Where the journal takes no more, it is as before and runs out again the next time.
            with contextlib.suppress(SessionKVError):
                self._commits.submit(PendingCommit(change, CallDone(-1)))

    def _let_go(self) -> None:
        for head in list(islice(self._tree.coldest(), _LOOKED_AT)):
            if self._is_in_use(head):
                self._tree.used(head)
                continue
            self._turns.last_cache.pop(self._tree.head(*head).node_id)
            self._tree.let_go(head)
            if self._tree.num_bytes <= MEMORY_BYTES:
                return

    def _is_in_use(self, head: HeadId) -> bool:
        if self._turns.is_running(head) or self._loader.is_awaited(head):
            return True
        kv = self._parts.kv
        return any(kv.tiers_of(key) for key in self._tree.released_keys(head))
