"""Which sessions of the journal are in memory: taken in when asked for, let go when cold.

A session comes with all its turns. In memory it is ahead of the journal by the changes that are not
durable yet, so what is here wins over what the journal says; and what a change touches stays until
the change is settled. A pinned session stays while it is pinned: its pin has to be known.

Of the blocks of a session that is not in memory nobody here knows that they are retained. The
caller lets go of none whose blocks are still in a memory tier, so of those the ranks are right; on
disk a block keeps the rank it had.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from sessionkv.cache.retention import Retention
from sessionkv.cache.tree_view import TreeView
from sessionkv.cache.turns import Change, HeadId, Node
from sessionkv.config import LimitsConfig
from sessionkv.errors import SessionExists
from sessionkv.types import BlockHash, JournalSummary, StoredSession

_MAX_REMEMBERED = 65_536
"""Names known not to be in the journal, and those known to be damaged, each."""


class TreeMemory(TreeView):
    """The part of :class:`~sessionkv.cache.tree.TurnTree` that takes sessions in. One thread."""

    def __init__(self, limits: LimitsConfig, retention: Retention, journal: JournalSummary) -> None:
        """Nothing is in memory."""
        super().__init__(limits, retention, journal)
        self._absent: OrderedDict[HeadId, None] = OrderedDict()
        self._pending: dict[HeadId, int] = {}

    def knows(self, head_id: HeadId) -> bool:
        """Whether the session is in memory, damaged, or known not to exist; else look it up."""
        state = self._state
        return (
            head_id in state.heads
            or head_id in self._absent
            or head_id in state.damaged
            or len(state.heads) == state.num_sessions
        )

    def take_in(self, head_id: HeadId, found: StoredSession | None) -> bool:
        """What the journal has under a name; whether a session came into memory. O(turns).

        Nothing happens where the name is known by now. Hashes are unknown until attached.
        """
        if self.knows(head_id):
            return False
        if found is None:
            self._note_absent(head_id)
            return False
        if not found.nodes:
            self._state.damaged[head_id] = found.damage
            while len(self._state.damaged) > _MAX_REMEMBERED:
                del self._state.damaged[next(iter(self._state.damaged))]
            return False
        parent: Node | None = None
        for stored in found.nodes:
            node = self._state.nodes.get(stored.record.node_id)
            if node is None:
                node = Node(stored.record, parent, head_id[0])
                node.heads, node.children = stored.heads, stored.children
                self._state.keep_node(node)
            parent = node
        if parent is not None:
            self._state.keep_head(found.head, parent)
        return True

    def used(self, head_id: HeadId) -> None:
        """The session is the one used last; one that is not in memory is passed over."""
        if head_id in self._state.heads:
            self._state.heads.move_to_end(head_id)

    def coldest(self) -> Iterator[HeadId]:
        """Sessions that may be let go, the one used longest ago first; none may go meanwhile."""
        for head_id, head in self._state.heads.items():
            if not head.pin_tier and head_id not in self._pending:
                yield head_id

    def released_keys(self, head_id: HeadId) -> Iterator[BlockHash]:
        """Block keys that would have no owner if the session were let go, from the root down."""
        leaving: list[Node] = []
        for node in self._state.nodes[self._state.heads[head_id].node_id].up():
            if node.held > 1:
                break
            leaving.append(node)
        owners = self.retention.owners
        for node in reversed(leaving):
            for key in node.keys:
                if owners(key) == 1:
                    yield key

    def let_go(self, head_id: HeadId) -> None:
        """Forget a session that :meth:`coldest` named; the journal has it. O(turns).

        Raises:
            ValueError: It is pinned, or a change of it is not settled.
        """
        head = self._state.heads[head_id]
        if head.pin_tier or head_id in self._pending:
            raise ValueError(f"the session {head.name!r} has to stay in memory")
        node = self._state.nodes[head.node_id]
        del self._state.heads[head_id]
        node.held -= 1
        self._lose_unheld(node)

    def settle(self, change: Change) -> None:
        """The change is durable, or was taken back: what it touched may leave memory."""
        for head_id in change.heads:
            self._pending[head_id] -= 1
            if not self._pending[head_id]:
                del self._pending[head_id]
        for node in change.touched:
            node.held -= 1
        for node in change.touched:
            if self._state.nodes.get(node.record.node_id) is node:
                self._lose_unheld(node)

    @property
    def num_bytes(self) -> int:
        """About what the turns in memory take."""
        return self._state.num_bytes

    @property
    def num_loaded(self) -> int:
        """Sessions in memory, unnamed ones too."""
        return len(self._state.heads)

    def _hold(self, change: Change) -> Change:
        for head_id in change.heads:
            self._pending[head_id] = self._pending.get(head_id, 0) + 1
        for node in change.touched:
            node.held += 1
        return change

    def _note_absent(self, head_id: HeadId) -> None:
        self._absent[head_id] = None
        self._absent.move_to_end(head_id)
        if len(self._absent) > _MAX_REMEMBERED:
            self._absent.popitem(last=False)

    def _note_heads(self, change: Change) -> None:
        """After doing a change or taking it back: which of its names there are."""
        for head_id in change.heads:
            if head_id in self._state.heads:
                self._absent.pop(head_id, None)
            else:
                self._note_absent(head_id)

    def _check_free(self, head_id: HeadId) -> None:
        """See that there is no session of that name.

        Raises:
            SessionExists, SessionDamaged: There is.
            ValueError: Nobody looked; without that a session in the journal could be overwritten.
        """
        if head_id in self._state.heads:
            raise SessionExists(f"there is a session named {head_id[1]!r}")
        if head_id in self._state.damaged:
            raise self._damaged(head_id)
        if not self.knows(head_id):
            raise ValueError(f"the session {head_id[1]!r} was not looked up")

    def _lose_unheld(self, node: Node) -> None:
        while not node.held:
            self._state.lose_node(node)
            self.retention.forget(node.keys, tenant=node.tenant)
            if node.parent is None:
                return
            node = node.parent
