"""Moves of heads on the tree of turns: fork, branch, rewind, pins, deletion, expiry, undoing."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import replace

from sessionkv.cache.retention import Retention
from sessionkv.cache.tree_checks import check_name, check_pin, check_turns
from sessionkv.cache.tree_memory import TreeMemory
from sessionkv.cache.tree_state import Transaction, is_unnamed
from sessionkv.cache.tree_view import no_node
from sessionkv.cache.turns import (
    BRANCH_PREFIX,
    UNNAMED_PREFIX,
    Change,
    HeadId,
    Node,
    format_node_id,
)
from sessionkv.config import LimitsConfig
from sessionkv.errors import InvalidRequest, Overloaded, RewindBeyondRoot
from sessionkv.types import (
    DeleteHead,
    DropSession,
    ForgetKeys,
    HeadRecord,
    JournalSummary,
    KeepIds,
    PutHead,
)
from sessionkv.types.node_ids import NodeIds, number_of

MAX_UNNAMED = 100_000
UNNAMED_TTL_S = 30 * 24 * 3600.0
EXPIRE_BATCH = 1_000
"""Heads that one call of :meth:`TreeHeads.expire` handles: transactions stay small."""


class TreeHeads(TreeMemory):
    """The part of :class:`~sessionkv.cache.tree.TurnTree` that adds no nodes. One thread.

    Attributes:
        max_unnamed: Unnamed heads past so many are due, the oldest of the tenant that has most.
    """

    def __init__(
        self,
        limits: LimitsConfig,
        retention: Retention,
        journal: JournalSummary,
        *,
        max_unnamed: int,
    ) -> None:
        """Nothing is in memory of this journal."""
        super().__init__(limits, retention, journal)
        self.max_unnamed = max_unnamed
        next_ids = journal.next_node_id, *journal.other_next_ids
        self._ids = NodeIds(next_ids, first_number=journal.first_number)
        self._serials = 0
        self._last_serial = 0

    def fork(
        self, tenant: str, source: str, name: str | None, *, now: float, node_id: int | None = None
    ) -> Change:
        """New head on the source's node, or on an ancestor of it; O(1). Pins are not copied.

        Args:
            tenant: Whose sessions.
            source: An existing session.
            name: Of the new one; None lets the tree name it, and it is kept for 30 days.
            now: Wall-clock seconds.
            node_id: A node on the source's path, or its number.

        Raises:
            SessionNotFound, NodeNotFound, InvalidRequest, SessionExists, Overloaded: As named.
            SessionDamaged: One of the two cannot be read.
        """
        head = self.head(tenant, source)
        node = self._state.nodes[head.node_id]
        if node_id is not None:
            node = self._on_path(node, node_id)
        if name is None:
            return self._branch(tenant, node, head.history, now)
        check_name("name", name, self._limits.session_name_bytes)
        self._check_free((tenant, name))
        self._check_new_name(tenant, "name", name)
        transaction = Transaction(self._state)
        new = fresh_head(tenant, name, node, head.history, now)
        transaction.do(PutHead(new, is_new=True))
        return self._change(transaction, new)

    def rename(self, tenant: str, source: str, name: str, *, now: float) -> Change:
        """Give the head another name; its pin goes with it. O(1) without a pin.

        Raises:
            SessionNotFound, InvalidRequest, SessionExists, Overloaded: As named.
            SessionDamaged: One of the two cannot be read.
        """
        head = self.head(tenant, source)
        check_name("name", name, self._limits.session_name_bytes)
        self._check_free((tenant, name))
        self._check_new_name(tenant, "name", name, beside=0 if is_unnamed(source) else -1)
        renamed = replace(head, name=name, updated_s=now)
        transaction = Transaction(self._state)
        transaction.do(PutHead(renamed, is_new=True))  # first: the node is never without a head
        transaction.do(DeleteHead(tenant, source))
        return self._change(transaction, renamed)

    def branch(self, tenant: str, node_id: int, *, now: float, history: str = "keep") -> Change:
        """New unnamed head on any of the tenant's nodes in memory.

        Raises:
            NodeNotFound: The tenant has no such node there.
        """
        node = self._state.nodes.get(node_id)
        if node is None or node.tenant != tenant:
            raise no_node(node_id)
        return self._branch(tenant, node, history, now)

    def rewind(self, tenant: str, name: str, turns: int, *, now: float) -> Change:
        """Move the head ``turns`` nodes up; nodes that no head reaches go with it. O(turns).

        Raises:
            SessionNotFound: There is no such session.
            InvalidRequest: ``turns`` is not a positive integer.
            RewindBeyondRoot: There are fewer turns.
        """
        head = self.head(tenant, name)
        node = self._state.nodes[head.node_id]
        check_turns(turns)
        if turns > node.depth:
            raise RewindBeyondRoot(
                f"{turns} turns cannot be taken back: the session has {node.depth}",
                turns=turns,
                num_turns=node.depth,
            )
        target = node
        for _ in range(turns):
            target = target.parent or target
        return self._move(head, target, now)

    def move_head(self, tenant: str, name: str, node_id: int, *, now: float) -> Change:
        """Move the head to an ancestor of its node, or to the same node.

        Raises:
            SessionNotFound, NodeNotFound: As named.
        """
        head = self.head(tenant, name)
        return self._move(head, self._on_path(self._state.nodes[head.node_id], node_id), now)

    def pin(
        self,
        tenant: str,
        name: str,
        *,
        tier: str,
        now: float,
        ttl_s: float | None = None,
        priority: int = 50,
    ) -> Change:
        """Let the session's blocks leave ``tier`` last; replaces its earlier pin. O(history).

        Raises:
            SessionNotFound: There is no such session.
            InvalidRequest: Tier, time or priority is not allowed.
            PinRefused: All live pins in the tier would need more than 80% of its cap.
        """
        head = self.head(tenant, name)
        place = check_pin(tier, ttl_s, priority)
        node = self._state.nodes[head.node_id]
        wanted = {key for owner in node.up() for key in owner.keys}
        self.retention.check_quota(tenant, place, wanted)
        self.retention.check_pin(place, wanted)
        return self._put_head(
            replace(
                head,
                pin_tier=place.value,
                pin_expires_s=None if ttl_s is None else now + ttl_s,
                pin_priority=priority,
                updated_s=now,
            )
        )

    def unpin(self, tenant: str, name: str, *, now: float) -> Change:
        """Take the session's pin off, if it has one.

        Raises:
            SessionNotFound: There is no such session.
        """
        return self._put_head(replace(_unpinned(self.head(tenant, name)), updated_s=now))

    def touch(self, tenant: str, name: str, *, now: float) -> Change:
        """Mark the session as used.

        Raises:
            SessionNotFound: There is no such session.
        """
        return self._put_head(replace(self.head(tenant, name), updated_s=now))

    def delete(self, tenant: str, name: str) -> Change:
        """Delete the head, and every node that no other head reaches.

        Raises:
            SessionNotFound: There is no such session.
        """
        transaction = Transaction(self._state)
        if (tenant, name) in self._state.damaged:
            transaction.do(DropSession(tenant, name))
        else:
            self._delete_head(transaction, self.head(tenant, name))
        return self._change(transaction, None)

    def expire(self, now: float, unnamed: Iterable[HeadId] = ()) -> Change | None:
        """Let what ran out fall off: pins, and of the unnamed heads those that are named.

        O(what runs out); at most :data:`EXPIRE_BATCH` pins, the rest next time. None if nothing
        did.

        Args:
            now: Wall-clock seconds.
            unnamed: Unnamed heads that the journal says are due; those that are not any more,
                or are not in memory, stay.
        """
        transaction = Transaction(self._state)
        for head in self._take_ended_pins(now):
            transaction.do(PutHead(_unpinned(head)))
            path = self._state.nodes[head.node_id].up()
            self.retention.note_lapsed(key for node in path for key in node.keys)
        for head_id in unnamed:
            due = self._state.heads.get(head_id)
            if head_id in self._state.damaged:
                transaction.do(DropSession(*head_id))
            elif due is not None and (
                due.updated_s <= now - UNNAMED_TTL_S or self._are_too_many(due.tenant)
            ):
                self._delete_head(transaction, due)
        return self._change(transaction, None) if transaction.ops else None

    def forget_keys(self, now: float) -> Change:
        """Have the journal forget idempotency keys that ran out."""
        transaction = Transaction(self._state)
        transaction.journal(self._forget_keys(now))
        return self._change(transaction, None)

    def revert(self, change: Change) -> None:
        """Take back the last change that was not yet taken back, because its commit failed.

        It is settled then.

        Raises:
            ValueError: It is not the last one.
        """
        if change.serial != self._last_serial:
            raise ValueError("changes are taken back last first, and once")
        nodes = dict(change.nodes)
        for op in change.undo:
            self._state.apply(op, nodes, [])
        self._note_heads(change)
        for op in change.ops:
            if isinstance(op, DropSession):  # the journal has it still, and is to be asked again
                self._absent.pop((op.tenant, op.name), None)
        self._last_serial = change.previous
        self.settle(change)

    def _on_path(self, node: Node, node_id: int) -> Node:
        """The ancestor of that id, or of that number, ``node`` included."""
        for ancestor in node.up():
            if node_id in (ancestor.record.node_id, number_of(ancestor.record.node_id)):
                return ancestor
        raise no_node(node_id)

    def _check_new_name(self, tenant: str, field: str, name: str, *, beside: int = 0) -> None:
        if name.startswith(BRANCH_PREFIX):
            raise InvalidRequest(field, name, f"a name that does not begin with {BRANCH_PREFIX}")
        if is_unnamed(name):
            self._check_unnamed(tenant)
        elif not self._state.named.has_room(tenant, self._limits.sessions, beside + 1):
            held = self._state.named.of(tenant)
            raise Overloaded(
                f"there are {held} sessions, as many as may be; delete some",
                retry_after_s=60.0,
                sessions=held,
            )

    def _check_unnamed(self, tenant: str) -> None:
        """They are taken away some at a time: who makes them faster than that has to wait."""
        if not self._state.unnamed.has_room(tenant, 2 * self.max_unnamed):
            held = self._state.unnamed.of(tenant)
            raise Overloaded(
                f"there are {held} sessions that run out by themselves, twice as many as may "
                "stay; the oldest are being deleted",
                retry_after_s=1.0,
                sessions=held,
            )

    def _are_too_many(self, tenant: str) -> bool:
        """Whether unnamed heads of the tenant are to make room: not while it has only its share."""
        held = self._state.unnamed
        is_past = held.of(tenant) > held.share(tenant, self.max_unnamed)
        return held.total > self.max_unnamed and is_past

    def _branch(self, tenant: str, node: Node, history: str, now: float) -> Change:
        self._check_unnamed(tenant)
        # A number that is never given again makes a name that nobody ever had.
        number = self.reserve_node_id(tenant)
        name = f"{UNNAMED_PREFIX}{format_node_id(node.record.node_id)}.{number_of(number)}"
        head = fresh_head(tenant, name, node, history, now)
        transaction = Transaction(self._state)
        transaction.do(PutHead(head, is_new=True))
        transaction.journal(KeepIds(number + 1))
        return self._change(transaction, head)

    def reserve_node_id(self, tenant: str) -> int:
        """An id for a node of the tenant to be added later; lost if it never is."""
        return self._ids.reserve(tenant)

    def _forget_keys(self, now: float) -> ForgetKeys:
        limits = self._limits
        return ForgetKeys(now - limits.idempotency_ttl_s, int(limits.idempotency_keys))

    def _move(self, head: HeadRecord, target: Node, now: float) -> Change:
        before = self._state.nodes[head.node_id]
        moved = replace(head, node_id=target.record.node_id, updated_s=now)
        transaction = Transaction(self._state)
        transaction.do(PutHead(moved))
        transaction.free_from(before)
        return self._change(transaction, moved)

    def _put_head(self, head: HeadRecord) -> Change:
        transaction = Transaction(self._state)
        transaction.do(PutHead(head))
        return self._change(transaction, head)

    def _delete_head(self, transaction: Transaction, head: HeadRecord) -> None:
        transaction.do(DeleteHead(head.tenant, head.name))
        transaction.free_from(self._state.nodes[head.node_id])

    def _take_ended_pins(self, now: float) -> Iterator[HeadRecord]:
        ends = self._state.pin_ends
        for _ in range(EXPIRE_BATCH):
            if not ends or ends[0][0] > now:
                return
            expires_s, head_id = heapq.heappop(ends)
            head = self._state.heads.get(head_id)
            if head is not None and head.pin_expires_s == expires_s:
                yield head

    def _change(
        self, transaction: Transaction, head: HeadRecord | None, *, node_id: int | None = None
    ) -> Change:
        """Close the transaction: it gets its place in the order of changes."""
        previous = self._last_serial
        self._serials += 1
        self._last_serial = self._serials
        change = Change(
            ops=tuple(transaction.ops),
            head=head,
            node_id=node_id,
            freed_node_ids=transaction.freed_node_ids(),
            freed_keys=transaction.freed_keys(),
            serial=self._last_serial,
            previous=previous,
            undo=tuple(reversed(transaction.undo)),
            nodes=transaction.nodes,
            touched=transaction.touched(),
            heads=transaction.heads(),
        )
        self._note_heads(change)
        return self._hold(change)


def fresh_head(tenant: str, name: str, node: Node, history: str, now: float) -> HeadRecord:
    """A head that was never moved or pinned."""
    return HeadRecord(
        tenant=tenant,
        name=name,
        node_id=node.record.node_id,
        pin_tier="",
        pin_expires_s=None,
        pin_priority=0,
        history=history,
        created_s=now,
        updated_s=now,
    )


def _unpinned(head: HeadRecord) -> HeadRecord:
    return replace(head, pin_tier="", pin_expires_s=None, pin_priority=0)
