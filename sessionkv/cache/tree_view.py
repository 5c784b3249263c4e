"""Questions to the tree of turns; none of them changes anything.

Answered from what is in memory: a session has to be there with all its turns.
"""

from __future__ import annotations

from collections.abc import Iterator

from sessionkv.cache.quotas import Part
from sessionkv.cache.retention import Retention
from sessionkv.cache.tree_state import TreeState
from sessionkv.cache.turns import HeadId, Node, SessionKeys, format_node_id
from sessionkv.config import LimitsConfig
from sessionkv.errors import NodeNotFound, SessionDamaged, SessionNotFound, TurnKind
from sessionkv.types import BlockHash, HeadRecord, JournalSummary, NodeRecord, unpack_tokens


class TreeView:
    """The half of :class:`~sessionkv.cache.tree.TurnTree` that only looks. One thread.

    Attributes:
        retention: What the sessions still want of the cache; changed by the tree alone.
    """

    def __init__(self, limits: LimitsConfig, retention: Retention, journal: JournalSummary) -> None:
        """Look at nothing of this journal."""
        self.retention = retention
        self._limits = limits
        self._state = TreeState(retention, journal.tenants, num_sessions=journal.num_sessions)

    def head(self, tenant: str, name: str) -> HeadRecord:
        """The session.

        Raises:
            SessionNotFound: There is no such session in memory.
            SessionDamaged: It cannot be read.
        """
        head = self._state.heads.get((tenant, name))
        if head is not None:
            return head
        if (tenant, name) in self._state.damaged:
            raise self._damaged((tenant, name))
        raise SessionNotFound(f"there is no session named {name!r}")

    def is_damaged(self, head_id: HeadId) -> bool:
        """Whether the session is known to have a turn that cannot be read."""
        return head_id in self._state.damaged

    def record(self, node_id: int) -> NodeRecord:
        """The node's record.

        Raises:
            NodeNotFound: There is no such node.
        """
        return self._node(node_id).record

    def path(self, node_id: int) -> list[NodeRecord]:
        """Records from the root to the node. O(turns)."""
        return [node.record for node in self._path(node_id)]

    def num_turns(self, node_id: int) -> int:
        """Turns from the root to the node; the root is none."""
        return self._node(node_id).depth

    def check_kind(self, node_id: int, kind: str) -> None:
        """See whether a turn of this kind may follow the node.

        Raises:
            NodeNotFound: There is no such node.
            TurnKind: The session has turns of the other kind.
        """
        node = self._node(node_id)
        if node.depth and node.record.kind != kind:
            raise TurnKind(f"the session has {node.record.kind} turns; this is a {kind} turn")

    def num_tokens(self, node_id: int) -> int:
        """Tokens of the log up to the node's end."""
        return self._node(node_id).end

    def tokens_of(self, node_id: int) -> list[int]:
        """The log up to the node's end, as a new list. O(history), some nanoseconds a token."""
        return unpack_tokens(b"".join(node.record.token_ids for node in self._path(node_id)))

    def own_tokens(self, node_id: int) -> list[int]:
        """The node's own tokens, as a new list. O(those)."""
        return unpack_tokens(self._node(node_id).record.token_ids)

    def hashes_of(self, node_id: int) -> list[BlockHash]:
        """Hashes of the log's full blocks so far as attached, as a new list. O(blocks)."""
        hashes: list[BlockHash] = []
        for node in self._path(node_id):
            hashes += node.hashes or ()
        return hashes

    def tail_of(self, node_id: int) -> BlockHash | None:
        """Partial key of the unfilled block at the node's end; None for none or not known."""
        return self._node(node_id).tail

    def budget_of(self, node_id: int) -> int | None:
        """Most bytes of KV that are retained of the node's session, None for no limit."""
        return self._node(node_id).budget_bytes

    def kept_hashes_of(self, node_id: int) -> list[BlockHash]:
        """Of :meth:`hashes_of` those that are retained for the log. O(blocks)."""
        hashes: list[BlockHash] = []
        for node in self._path(node_id):
            hashes += node.kept
        return hashes

    def parts_of(self, node_id: int) -> list[Part]:
        """What is retained of the log by the nodes that own it, its end first. O(turns)."""
        node = self._node(node_id)
        parts: list[Part] = [(node.tail_part, node.kept_tail)] if node.heads else []
        return parts + [(above.record.node_id, above.kept) for above in node.up()]

    def keys_of(self, node_id: int) -> tuple[BlockHash, ...]:
        """Block keys the node owns: none past its session's budget."""
        return self._node(node_id).keys

    def session_keys(self, tenant: str, name: str) -> SessionKeys:
        """The session's keys, split into its own and those that others own as well. O(history).

        Over all sessions the exclusive ones and each shared one once are all that is retained. What
        is declared public counts as shared, whoever has it: that others do is not to be seen.

        Raises:
            SessionNotFound: There is no such session.
        """
        head, public = self.head(tenant, name), self.retention.quotas.public
        exclusive: list[BlockHash] = []
        shared: list[BlockHash] = []
        # A node is this head's alone while one head and no other branch is below it.
        heads, children = 1, 0
        for node in self._state.nodes[head.node_id].up():
            alone = node.heads == heads and node.children == children
            for key in reversed(node.keys):
                alone_too = alone and self.retention.owners(key) == 1 and key not in public
                (exclusive if alone_too else shared).append(key)
            heads, children = (0, 1) if alone else (-1, -1)
        return SessionKeys(tuple(reversed(exclusive)), tuple(reversed(shared)))

    def keys_of_tenant(self, tenant: str) -> Iterator[BlockHash]:
        """What the tenant's sessions in memory want, some of it more than once. O(nodes)."""
        for head in self._state.heads.values():
            if head.tenant == tenant:
                for node in self._state.nodes[head.node_id].up():
                    yield from node.keys

    def unattached(self) -> Iterator[HeadRecord]:
        """Sessions whose node's hashes or tail are unknown; attach as they come.

        :meth:`hashes_of` tells what is known already, by an earlier one of the same branch.
        """
        for head in tuple(self._state.heads.values()):
            node = self._state.nodes.get(head.node_id)
            if node is not None and (node.hashes is None or not node.tail_known):
                yield head

    @property
    def num_sessions(self) -> int:
        """Named heads of all tenants, those that are not in memory too."""
        return self._state.named.total

    @property
    def num_nodes(self) -> int:
        """Turns and roots in memory."""
        return len(self._state.nodes)

    @property
    def num_unnamed(self) -> int:
        """Heads of all tenants that run out by themselves, those that are not in memory too."""
        return self._state.unnamed.total

    def _damaged(self, head_id: HeadId) -> SessionDamaged:
        what = self._state.damaged[head_id]
        return SessionDamaged(
            f"the session {head_id[1]!r} cannot be read: {what} is damaged on disk; "
            "it can only be deleted",
            session=head_id[1],
            damaged=what,
        )

    def _node(self, node_id: int) -> Node:
        node = self._state.nodes.get(node_id)
        if node is None:
            raise no_node(node_id)
        return node

    def _path(self, node_id: int) -> list[Node]:
        return list(self._node(node_id).up())[::-1]


def no_node(node_id: int) -> NodeNotFound:
    """The error for a node that is not there, or not where it was looked for."""
    shown = format_node_id(node_id)
    return NodeNotFound(f"there is no turn {shown} here", node=shown)
