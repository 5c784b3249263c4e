"""What the journal's operations do in memory: one method for each, with its inverse.

The same code takes a session in from the journal, makes a change and takes one back, so memory and
journal cannot drift apart. Also keeps what is derived: reference counts, retention, and which pins
run out next. Checks nothing: the rules are the tree's. What is in memory of the journal and what
leaves again is ``tree_memory``'s.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, MutableMapping, Sequence

from sessionkv.cache.retention import Pin, Retention
from sessionkv.cache.turns import UNNAMED_PREFIX, HeadId, Node
from sessionkv.types import (
    BlockHash,
    DeleteHead,
    DeleteNode,
    DropSession,
    HeadRecord,
    JournalOp,
    PutHead,
    PutNode,
    TenantSessions,
    Tier,
)
from sessionkv.types.holdings import Holdings


def is_unnamed(name: str) -> bool:
    """Whether the head runs out by itself, as its name says."""
    return name.startswith(UNNAMED_PREFIX)


class TreeState:
    """Nodes and heads that are in memory, with everything derived from them. One thread.

    Attributes:
        nodes: By id; with a node all its ancestors.
        heads: By tenant and name, the one used longest ago first.
        damaged: Sessions known to have a turn that cannot be read, and what that is.
        named: Heads in the whole journal that stay until they are deleted, by tenant.
        unnamed: Heads in the whole journal that run out by themselves, by tenant.
        num_sessions: Heads in the whole journal; those that cannot be read may be of nobody.
        num_bytes: About what ``nodes`` take.
        pin_ends: Heap of (end of pin, head); entries whose head has another end by now are stale.
    """

    def __init__(
        self,
        retention: Retention,
        tenants: Iterable[TenantSessions] = (),
        *,
        num_sessions: int = 0,
    ) -> None:
        """Nothing in memory of a journal of these tenants, with so many heads in all."""
        self.retention = retention
        self.nodes: dict[int, Node] = {}
        self.heads: OrderedDict[HeadId, HeadRecord] = OrderedDict()
        self.damaged: dict[HeadId, str] = {}
        tenants = tuple(tenants)
        self.named = Holdings({of.tenant: of.num_named for of in tenants})
        self.unnamed = Holdings({of.tenant: of.num_unnamed for of in tenants})
        self.num_sessions = num_sessions
        self.num_bytes = 0
        self.pin_ends: list[tuple[float, HeadId]] = []

    def apply(
        self, op: JournalOp, nodes: MutableMapping[int, Node], freed: list[BlockHash]
    ) -> JournalOp:
        """Do ``op``; return the operation that takes it back.

        Args:
            op: What to do; those on idempotency keys and ids are the journal's alone.
            nodes: Where a node that is put is found, and one that is deleted is left.
            freed: Keys that lost their last owner are added; a later step may own them again.
        """
        if isinstance(op, PutNode):
            return self._put_node(nodes[op.node.node_id])
        if isinstance(op, DeleteNode):
            node = nodes[op.node_id] = self.nodes[op.node_id]
            return self._delete_node(node, freed)
        if isinstance(op, PutHead):
            return self._set_head((op.head.tenant, op.head.name), op.head, freed)
        if isinstance(op, DeleteHead):
            return self._set_head((op.tenant, op.name), None, freed)
        if isinstance(op, DropSession):
            return self._drop_session(op)
        raise TypeError(f"{op} changes nothing in memory")

    def keep_node(self, node: Node) -> None:
        """A node is in memory."""
        self.nodes[node.record.node_id] = node
        self.num_bytes += node.num_bytes
        if node.parent is not None:
            node.parent.held += 1

    def lose_node(self, node: Node) -> None:
        """A node is in memory no longer; nor is anything below it."""
        del self.nodes[node.record.node_id]
        self.num_bytes -= node.num_bytes
        if node.parent is not None:
            node.parent.held -= 1

    def keep_head(self, head: HeadRecord, node: Node) -> None:
        """A head that the journal has is in memory, with its pin."""
        head_id = head.tenant, head.name
        node.held += 1
        self._move_pins(None, None, node, pin_of(head))
        self.heads[head_id] = head
        self._watch_pin(head_id, head)

    def attach(self, node: Node, hashes: Sequence[BlockHash], block_size: int) -> None:
        """Give the node and those of its ancestors that lack it their part of the hashes."""
        for lacking in node.up():
            if lacking.hashes is not None:
                break
            block_bytes = self.retention.block_bytes
            lacking.take_hashes(hashes, block_size=block_size, block_bytes=block_bytes)
            self.retention.own(
                lacking.kept, lacking.pins, tenant=node.tenant, part=lacking.record.node_id
            )

    def attach_tail(self, node: Node, tail: BlockHash | None) -> None:
        """Give the node its tail key, in place of the one it had."""
        if node.heads:
            self._disown_tail(node, [])
        node.tail, node.tail_known = tail, True
        if node.heads:
            self._own_tail(node)

    def _put_node(self, node: Node) -> JournalOp:
        self.keep_node(node)
        if node.parent is not None:
            node.parent.children += 1
        self.retention.own(node.kept, tenant=node.tenant, part=node.record.node_id)
        return DeleteNode(node.record.node_id)

    def _delete_node(self, node: Node, freed: list[BlockHash]) -> JournalOp:
        self.lose_node(node)
        if node.parent is not None:
            node.parent.children -= 1
        freed += reversed(node.excess)  # owned by nobody on its account
        kept = self.retention.disown(node.kept, tenant=node.tenant, part=node.record.node_id)
        freed += reversed(kept)
        return PutNode(node.record)

    def _set_head(
        self, head_id: HeadId, new: HeadRecord | None, freed: list[BlockHash]
    ) -> JournalOp:
        old = self.heads.get(head_id)
        before = self.nodes[old.node_id] if old else None
        after = self.nodes[new.node_id] if new else None
        # The new place first: what both places own must not look freed in between.
        if after is not None and after is not before:
            after.heads += 1
            after.held += 1
            if after.heads == 1:
                self._own_tail(after)
        self._move_pins(before, pin_of(old), after, pin_of(new))
        if before is not None and after is not before:
            if before.heads == 1:
                self._disown_tail(before, freed)
            before.heads -= 1
            before.held -= 1
        self._list_head(head_id, old, new)
        return PutHead(old) if old else DeleteHead(*head_id)

    def _list_head(self, head_id: HeadId, old: HeadRecord | None, new: HeadRecord | None) -> None:
        if new is None:
            del self.heads[head_id]
            self._count(head_id, -1)
            return
        self.heads[head_id] = new
        self.heads.move_to_end(head_id)
        if old is None:
            self._count(head_id, 1)
        if old is None or old.pin_expires_s != new.pin_expires_s:
            self._watch_pin(head_id, new)

    def _drop_session(self, op: DropSession) -> JournalOp:
        """Its own inverse: the second time the journal has it again and is to be asked anew."""
        head_id = op.tenant, op.name
        self._count(head_id, 1 if self.damaged.pop(head_id, None) is None else -1)
        return op

    def _count(self, head_id: HeadId, change: int) -> None:
        tenant, name = head_id
        self.num_sessions += change
        (self.unnamed if is_unnamed(name) else self.named).add(tenant, change)

    def _watch_pin(self, head_id: HeadId, head: HeadRecord) -> None:
        if head.pin_expires_s is not None:
            heapq.heappush(self.pin_ends, (head.pin_expires_s, head_id))

    def _own_tail(self, node: Node) -> None:
        part = node.tail_part
        self.retention.own(node.kept_tail, node.pins, tenant=node.tenant, part=part)

    def _disown_tail(self, node: Node, freed: list[BlockHash]) -> None:
        part = node.tail_part
        freed += self.retention.disown(node.kept_tail, node.pins, tenant=node.tenant, part=part)
        if node.tail is not None and not node.keeps_tail:
            freed.append(node.tail)

    def _move_pins(
        self, before: Node | None, old: Pin | None, after: Node | None, new: Pin | None
    ) -> None:
        """Pins count along the path; where two paths share their upper part it stays as it is."""
        shared = _common(before, after) if old == new else None
        if new is not None and after is not None:
            for node in after.up():
                if node is shared:
                    break
                node.pins[new] = node.pins.get(new, 0) + 1
                if node.pins[new] == 1:
                    self.retention.pin(new, node.keys, tenant=node.tenant)
        if old is not None and before is not None:
            for node in before.up():
                if node is shared:
                    break
                node.pins[old] -= 1
                if not node.pins[old]:
                    del node.pins[old]
                    self.retention.unpin(old, node.keys, tenant=node.tenant)


class Transaction:
    """Operations of one change, applied as they are added."""

    def __init__(self, state: TreeState) -> None:
        """Nothing done yet."""
        self._state = state
        self.ops: list[JournalOp] = []
        self.undo: list[JournalOp] = []
        self.nodes: dict[int, Node] = {}
        self._tails: list[BlockHash] = []
        self._blocks: list[BlockHash] = []

    def do(self, op: JournalOp) -> None:
        """Add and apply one operation."""
        self.ops.append(op)
        freed = self._blocks if isinstance(op, DeleteNode) else self._tails
        self.undo.append(self._state.apply(op, self.nodes, freed))

    def journal(self, op: JournalOp) -> None:
        """Add an operation that changes nothing in memory."""
        self.ops.append(op)

    def add_node(self, node: Node) -> None:
        """Add a node with what is derived from it."""
        self.nodes[node.record.node_id] = node
        self.do(PutNode(node.record))

    def free_from(self, node: Node | None) -> None:
        """Delete ``node`` and its ancestors as far as nothing reaches them."""
        while node is not None and not node.heads and not node.children:
            parent = node.parent
            self.do(DeleteNode(node.record.node_id))
            node = parent

    def freed_node_ids(self) -> tuple[int, ...]:
        """Nodes deleted so far."""
        return tuple(op.node_id for op in self.ops if isinstance(op, DeleteNode))

    def freed_keys(self) -> tuple[BlockHash, ...]:
        """Keys that nobody owns now and that are to be dropped; see :class:`Change`."""
        owners = self._state.retention.owners
        deletes = any(isinstance(op, DeleteHead) for op in self.ops)
        keys = dict.fromkeys(self._tails + self._blocks if deletes else self._tails)
        return tuple(key for key in keys if not owners(key))

    def heads(self) -> tuple[HeadId, ...]:
        """Heads that were put or deleted, each once."""
        found = dict.fromkeys(
            (op.head.tenant, op.head.name) if isinstance(op, PutHead) else (op.tenant, op.name)
            for op in self.ops
            if isinstance(op, PutHead | DeleteHead | DropSession)
        )
        return tuple(found)

    def touched(self) -> tuple[Node, ...]:
        """Nodes that doing and undoing refer to, each once."""
        found: dict[int, Node] = {}
        for op in (*self.ops, *self.undo):
            if isinstance(op, PutHead):
                node_id = op.head.node_id
                found[node_id] = self.nodes.get(node_id) or self._state.nodes[node_id]
        for node in self.nodes.values():
            found[node.record.node_id] = node
            if node.parent is not None:
                found[node.parent.record.node_id] = node.parent
        return tuple(found.values())


def pin_of(head: HeadRecord | None) -> Pin | None:
    """Tier and priority of a head's pin, None where it has none."""
    return (Tier(head.pin_tier), head.pin_priority) if head and head.pin_tier else None


def _common(a: Node | None, b: Node | None) -> Node | None:
    """Deepest node on both paths to the root, None if they share none."""
    while a is not b and a is not None and b is not None:
        if a.depth >= b.depth:
            a = a.parent
        else:
            b = b.parent
    return a if a is b else None
