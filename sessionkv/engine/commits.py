"""Changes on their way to the journal, and what is to be said once they are durable.

The tree in memory is ahead of the journal by the changes listed here, oldest first. A failed
commit takes them back in reverse order, all of them: a later change may stand on the failed one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from sessionkv.cache.tree import TurnTree
from sessionkv.cache.turns import Change
from sessionkv.engine.messages import CoreMessage
from sessionkv.errors import SessionKVError
from sessionkv.store.worker import StoreWorker
from sessionkv.types import BlockHash


@dataclass(frozen=True, slots=True)
class PendingCommit:
    """One transaction under way.

    Attributes:
        change: To be reverted if the journal refuses it. An empty one only lets its reply wait for
            what was changed before.
        reply: Sent when it is durable.
        turn_id: The turn it commits, None for a call.
        call_id: The call it carries out, None for a turn.
        recomputed: Blocks of the turn's history that it had to compute again.
    """

    change: Change
    reply: CoreMessage
    turn_id: int | None = None
    call_id: int | None = None
    recomputed: tuple[BlockHash, ...] = ()


class Commits:
    """The list of pending commits. Core thread only."""

    def __init__(self, tree: TurnTree, store: StoreWorker) -> None:
        self._tree = tree
        self._store = store
        self._pending: OrderedDict[int, PendingCommit] = OrderedDict()
        self._next_ticket = 1

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def call_ids(self) -> tuple[int, ...]:
        """Calls that are answered by the journal."""
        return tuple(c.call_id for c in self._pending.values() if c.call_id is not None)

    def submit(self, commit: PendingCommit) -> None:
        """Hand a change that the tree has already applied to the journal.

        Raises:
            Overloaded: The journal takes no more; the change was taken back.
        """
        ticket = self._next_ticket
        self._next_ticket += 1
        try:
            self._store.commit(ticket, commit.change.ops)
        except SessionKVError:
            self._tree.revert(commit.change)
            raise
        self._pending[ticket] = commit

    def durable(self, ticket: int) -> PendingCommit | None:
        """The journal has it; None for a change that was already taken back."""
        commit = self._pending.pop(ticket, None)
        if commit is not None:
            self._tree.settle(commit.change)
        return commit

    def refused(self, ticket: int) -> list[PendingCommit]:
        """The journal refused it: takes back this change and every later one; returns them.

        The journal refuses the later ones too, until it is told that this was seen.
        """
        self._store.accept_again(ticket)
        failed = [t for t in self._pending if t >= ticket]
        undone = [self._pending.pop(t) for t in reversed(failed)]
        for commit in undone:
            self._tree.revert(commit.change)
        return undone
