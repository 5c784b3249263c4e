"""What the journal's operations do in memory: one method for each, with its inverse.

The same code loads a journal, makes a change and takes one back, so memory and journal cannot
drift apart. Also keeps what is derived: reference counts, retention, names in order, and which
heads and keys run out next. Checks nothing: the rules are the tree's.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import MutableMapping, Sequence
from typing import TypeVar

from sessionkv.cache.retention import Pin, Retention
from sessionkv.cache.turns import UNNAMED_PREFIX, HeadId, Node
from sessionkv.types import (
    BlockHash,
    DeleteHead,
    DeleteKey,
    DeleteNode,
    HeadRecord,
    JournalOp,
    KeyRecord,
    NodeRecord,
    PutHead,
    PutKey,
    PutNode,
    Tier,
)

_R = TypeVar("_R", HeadRecord, KeyRecord)


def is_unnamed(name: str) -> bool:
    """Whether the head was made by branching and named by the tree."""
    return name.startswith(UNNAMED_PREFIX)


class TreeState:
    """Nodes, heads and idempotency keys with everything derived from them. One thread.

    Attributes:
        nodes: By id.
        heads: By tenant and name.
        unnamed: Heads without a name of their own, least recently updated first.
        keys: By tenant and key, oldest first.
        pin_ends: Heap of (end of pin, head); entries whose head has another end by now are stale.
    """

    def __init__(self, retention: Retention) -> None:
        """Start empty."""
        self.retention = retention
        self.nodes: dict[int, Node] = {}
        self.heads: dict[HeadId, HeadRecord] = {}
        self.unnamed: OrderedDict[HeadId, HeadRecord] = OrderedDict()
        self.keys: OrderedDict[HeadId, KeyRecord] = OrderedDict()
        self.pin_ends: list[tuple[float, HeadId]] = []
        self._names: dict[tuple[str, bool], list[str]] = {}

    def names(self, tenant: str, *, unnamed: bool) -> Sequence[str]:
        """Names of a tenant's heads in order; a view."""
        return self._names.get((tenant, unnamed), ())

    def apply(
        self, op: JournalOp, nodes: MutableMapping[int, Node], freed: list[BlockHash]
    ) -> JournalOp:
        """Do ``op``; return the operation that takes it back.

        Args:
            op: What to do.
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
        if isinstance(op, PutKey):
            return self._put_key(op.key)
        if isinstance(op, DeleteKey):
            return PutKey(self.keys.pop((op.tenant, op.key)))
        raise TypeError(f"{op} is for the journal alone")

    def load_node(self, record: NodeRecord) -> None:
        """Take in a node from the journal, parents first."""
        parent = None if record.parent_id is None else self.nodes[record.parent_id]
        self._put_node(Node(record, parent, tenant=""))

    def load_head(self, record: HeadRecord) -> None:
        """Take in a head from the journal, after all nodes; tells the nodes whose they are."""
        for node in self.nodes[record.node_id].up():
            if node.tenant:
                break
            node.tenant = record.tenant
        self._set_head((record.tenant, record.name), record, [])

    def attach(self, node: Node, hashes: Sequence[BlockHash], block_size: int) -> None:
        """Give the node and those of its ancestors that lack it their part of the hashes."""
        for lacking in node.up():
            if lacking.hashes is not None:
                break
            own = tuple(hashes[lacking.start // block_size : lacking.end // block_size])
            lacking.hashes = own
            self.retention.own(own, lacking.pins)

    def attach_tail(self, node: Node, tail: BlockHash | None) -> None:
        """Give the node its tail key, in place of the one it had."""
        if node.heads:
            self._disown_tail(node, [])
        node.tail, node.tail_known = tail, True
        if node.heads:
            self._own_tail(node)

    def _put_node(self, node: Node) -> JournalOp:
        record = node.record
        self.nodes[record.node_id] = node
        if node.parent is not None:
            node.parent.children += 1
        self.retention.own(node.hashes or ())
        return DeleteNode(record.node_id)

    def _delete_node(self, node: Node, freed: list[BlockHash]) -> JournalOp:
        del self.nodes[node.record.node_id]
        if node.parent is not None:
            node.parent.children -= 1
        freed += self.retention.disown(node.hashes or ())
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
            if after.heads == 1:
                self._own_tail(after)
        self._move_pins(before, _pin(old), after, _pin(new))
        if before is not None and after is not before:
            if before.heads == 1:
                self._disown_tail(before, freed)
            before.heads -= 1
        self._list_head(head_id, old, new)
        return PutHead(old) if old else DeleteHead(*head_id)

    def _list_head(self, head_id: HeadId, old: HeadRecord | None, new: HeadRecord | None) -> None:
        tenant, name = head_id
        unnamed = is_unnamed(name)
        names = self._names.setdefault((tenant, unnamed), [])
        if new is None:
            del self.heads[head_id]
            self.unnamed.pop(head_id, None)
            del names[bisect_left(names, name)]
            return
        self.heads[head_id] = new
        if old is None:
            insort(names, name)
        if unnamed:
            self.unnamed.pop(head_id, None)
            _insert(self.unnamed, head_id, new, "updated_s")
        if new.pin_expires_s is not None and (
            old is None or old.pin_expires_s != new.pin_expires_s
        ):
            heapq.heappush(self.pin_ends, (new.pin_expires_s, head_id))

    def _put_key(self, record: KeyRecord) -> JournalOp:
        _insert(self.keys, (record.tenant, record.key), record, "created_s")
        return DeleteKey(record.tenant, record.key)

    def _own_tail(self, node: Node) -> None:
        if node.tail is not None:
            self.retention.own((node.tail,), node.pins)

    def _disown_tail(self, node: Node, freed: list[BlockHash]) -> None:
        if node.tail is not None:
            freed += self.retention.disown((node.tail,), node.pins)

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
                    self.retention.pin(new, node.keys)
        if old is not None and before is not None:
            for node in before.up():
                if node is shared:
                    break
                node.pins[old] -= 1
                if not node.pins[old]:
                    del node.pins[old]
                    self.retention.unpin(old, node.keys)


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


def _pin(head: HeadRecord | None) -> Pin | None:
    return (Tier(head.pin_tier), head.pin_priority) if head and head.pin_tier else None


def _common(a: Node | None, b: Node | None) -> Node | None:
    """Deepest node on both paths to the root, None if they share none."""
    while a is not b and a is not None and b is not None:
        if a.depth >= b.depth:
            a = a.parent
        else:
            b = b.parent
    return a if a is b else None


def _insert(queue: OrderedDict[HeadId, _R], item_id: HeadId, record: _R, stamp: str) -> None:
    """Add at the end; or at the front what is older than the last, which was taken from there."""
    last = next(reversed(queue.values()), None)
    queue[item_id] = record
    if last is not None and getattr(record, stamp) < getattr(last, stamp):
        queue.move_to_end(item_id, last=False)
