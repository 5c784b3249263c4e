"""The durable tree of turns: sessions are heads on it; fork, rewind and edit move heads.

A node is one immutable turn; it lives while a head or a child reaches it. Each operation checks
everything first and raises with nothing moved; then it changes memory and returns a
:class:`~sessionkv.cache.turns.Change` whose ``ops`` are one transaction of the journal. The caller
commits them before it acknowledges anything, and if that fails hands the change to
:meth:`TurnTree.revert`, last change first.

Kept here: loading the journal gives what is in memory; the keys a session retains are those its
nodes own; ids ascend and are never used twice. Not known here: text, hashing, places of blocks,
which turns are running (the caller's to guard), and the time, which is always an argument.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, takewhile
from typing import TypeVar

from sessionkv.cache.retention import Retention
from sessionkv.cache.tree_checks import check_name, check_pin, check_turns
from sessionkv.cache.tree_state import Transaction, is_unnamed
from sessionkv.cache.tree_view import TreeView, no_node
from sessionkv.cache.turns import (
    UNNAMED_PREFIX,
    Change,
    NewNode,
    Node,
    Opening,
    format_node_id,
    pack_tokens,
)
from sessionkv.config import LimitsConfig
from sessionkv.errors import (
    IdempotencyConflict,
    InvalidRequest,
    Overloaded,
    RewindBeyondRoot,
    SessionBusy,
    SessionDiffers,
    SessionExists,
    StoreUnavailable,
    TurnKind,
)
from sessionkv.types import (
    BlockHash,
    DeleteHead,
    DeleteKey,
    HeadRecord,
    JournalState,
    KeyRecord,
    NodeRecord,
    PutHead,
    PutKey,
)

__all__ = ["Change", "NewNode", "Opening", "TurnTree"]

MAX_UNNAMED = 100_000
UNNAMED_TTL_S = 30 * 24 * 3600.0
_R = TypeVar("_R")
EXPIRE_BATCH = 1_000
"""Heads and keys that one call of :meth:`TurnTree.expire` handles: transactions stay small."""


class TurnTree(TreeView):
    """Sessions, turns and idempotency keys. One thread."""

    def __init__(
        self,
        limits: LimitsConfig,
        retention: Retention,
        *,
        block_size: int,
        max_unnamed: int = MAX_UNNAMED,
    ) -> None:
        """Start empty."""
        super().__init__(limits, retention)
        self._block_size = block_size
        self._max_unnamed = max_unnamed
        self._next_node_id = 1
        self._serials = 0
        self._last_serial = 0

    @classmethod
    def load(
        cls,
        journal: JournalState,
        limits: LimitsConfig,
        retention: Retention,
        *,
        block_size: int,
        max_unnamed: int = MAX_UNNAMED,
    ) -> TurnTree:
        """Build the tree that the journal describes; hashes are unknown until attached. O(journal).

        Raises:
            StoreUnavailable: A node or head refers to a node that is not there.
        """
        tree = cls(limits, retention, block_size=block_size, max_unnamed=max_unnamed)
        state = tree._state
        try:
            for node in journal.nodes:
                state.load_node(node)
            for head in sorted(journal.heads, key=lambda head: head.updated_s):
                state.load_head(head)
        except KeyError as error:
            raise StoreUnavailable(f"the journal refers to node {error}, which it lacks") from None
        for key in sorted(journal.keys, key=lambda key: key.created_s):
            state.apply(PutKey(key), {}, [])
        last_id = journal.nodes[-1].node_id if journal.nodes else 0
        tree._next_node_id = max(journal.next_node_id, last_id + 1)
        return tree

    def open(
        self, tenant: str, name: str, *, root: NewNode, opening: Opening, now: float
    ) -> Change:
        """Create a session with its root node, or resume one (then there is nothing to journal).

        Raises:
            InvalidRequest: The name, or the history policy, is not allowed.
            SessionDiffers: It exists, and something said in ``opening`` is not as it is.
            Overloaded: There are as many sessions as may be.
        """
        check_name("session", name, self._limits.session_name_bytes)
        if opening.history not in (None, "keep", "follow"):
            raise InvalidRequest("history", opening.history, "keep or follow")
        head = self._state.heads.get((tenant, name))
        if head is not None:
            *_, first = self._state.nodes[head.node_id].up()
            differing = opening.differs_from(first.record.sampling_blob, head.history)
            if differing is not None:
                raise SessionDiffers(
                    f"the session exists and was opened with another value of {differing}",
                    field=differing,
                )
            return self._change(Transaction(self._state), head)
        self._check_new_name("session", name)
        root = replace(root, kind="root", sampling_blob=opening.to_blob())
        node = self._new_node(root, None, self._next_node_id, tenant=tenant, now=now)
        head = _fresh_head(tenant, name, node, opening.history or "keep", now)
        transaction = Transaction(self._state)
        transaction.add_node(node)
        transaction.do(PutHead(head))
        return self._change(transaction, head, added=node)

    def reserve_node_id(self) -> int:
        """An id for a node to be added later; lost if it never is."""
        node_id = self._next_node_id
        self._next_node_id += 1
        return node_id

    def append_turn(
        self,
        tenant: str,
        name: str,
        new: NewNode,
        *,
        base_id: int,
        now: float,
        parent_id: int | None = None,
        node_id: int | None = None,
        key: KeyRecord | None = None,
    ) -> Change:
        """Add a turn and move the head to it; its idempotency key goes in the same transaction.

        O(new tokens), and what an edited history frees.

        Args:
            tenant: Whose session.
            name: The session.
            new: The turn.
            base_id: Where the head was when the turn began.
            now: Wall-clock seconds.
            parent_id: An ancestor of the head that the turn follows in place of the head, where
                the history was edited; None is the head itself.
            node_id: Id from :meth:`reserve_node_id`; None takes the next.
            key: Idempotency key with the answer, if the turn has one.

        Raises:
            SessionNotFound: It was deleted, or never was.
            SessionBusy: The head has moved since the turn began.
            NodeNotFound: ``parent_id`` is not on the head's path.
            TurnKind: A chat turn after raw ones, or the other way round.
            IdempotencyConflict: The key is taken.
        """
        head = self.head(tenant, name)
        if head.node_id != base_id:
            raise SessionBusy("the session has moved on since this turn began")
        before = self._state.nodes[base_id]
        parent = before if parent_id is None else self._on_path(before, parent_id)
        if new.kind not in ("chat", "raw"):
            raise InvalidRequest("kind", new.kind, "chat or raw")
        if parent.depth and parent.record.kind != new.kind:
            raise TurnKind(f"the session has {parent.record.kind} turns; this is a {new.kind} turn")
        if key is not None:
            self._check_key(key, now)
        node = self._new_node(new, parent, node_id or self._next_node_id, tenant=tenant, now=now)
        moved = replace(head, node_id=node.record.node_id, updated_s=now)
        if new.hashes is not None:
            self._state.attach(parent, new.hashes, self._block_size)
        transaction = Transaction(self._state)
        transaction.add_node(node)
        transaction.do(PutHead(moved))
        transaction.free_from(before)
        if key is not None:
            self._add_key(transaction, key)
        return self._change(transaction, moved, added=node)

    def record_key(self, key: KeyRecord, *, now: float) -> Change:
        """Keep the answer of a generation under its idempotency key.

        Raises:
            IdempotencyConflict: The key is taken.
        """
        self._check_key(key, now)
        transaction = Transaction(self._state)
        self._add_key(transaction, key)
        return self._change(transaction, None)

    def fork(
        self, tenant: str, source: str, name: str | None, *, now: float, node_id: int | None = None
    ) -> Change:
        """New head on the source's node, or on an ancestor of it; O(1). Pins are not copied.

        Args:
            tenant: Whose sessions.
            source: An existing session.
            name: Of the new one; None lets the tree name it, and it is kept for 30 days.
            now: Wall-clock seconds.
            node_id: A node on the source's path.

        Raises:
            SessionNotFound, NodeNotFound, InvalidRequest, SessionExists, Overloaded: As named.
        """
        head = self.head(tenant, source)
        node = self._state.nodes[head.node_id]
        if node_id is not None:
            node = self._on_path(node, node_id)
        if name is None:
            return self._branch(tenant, node, head.history, now)
        check_name("name", name, self._limits.session_name_bytes)
        if (tenant, name) in self._state.heads:
            raise SessionExists(f"there is a session named {name!r}")
        self._check_new_name("name", name)
        transaction = Transaction(self._state)
        new = _fresh_head(tenant, name, node, head.history, now)
        transaction.do(PutHead(new))
        return self._change(transaction, new)

    def branch(self, tenant: str, node_id: int, *, now: float, history: str = "keep") -> Change:
        """New unnamed head on any of the tenant's nodes; the oldest go where there are too many.

        Raises:
            NodeNotFound: The tenant has no such node.
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
                f"the session has {node.depth} turns; {turns} were to be taken back",
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
        self.retention.check_pin(place, [key for owner in node.up() for key in owner.keys])
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
        head = self.head(tenant, name)
        transaction = Transaction(self._state)
        self._delete_head(transaction, head)
        return self._change(transaction, None)

    def expire(self, now: float) -> Change | None:
        """Let what ran out fall off: pins, unnamed heads, idempotency keys. None if nothing did.

        O(what runs out); at most :data:`EXPIRE_BATCH` of each, the rest next time.
        """
        transaction = Transaction(self._state)
        for head in self._take_ended_pins(now):
            transaction.do(PutHead(_unpinned(head)))
            path = self._state.nodes[head.node_id].up()
            self.retention.note_lapsed(key for node in path for key in node.keys)
        for head in _leading(self._state.unnamed.values(), "updated_s", now - UNNAMED_TTL_S):
            self._delete_head(transaction, head)
        oldest = now - self._limits.idempotency_ttl_s
        for key in _leading(self._state.keys.values(), "created_s", oldest):
            transaction.do(DeleteKey(key.tenant, key.key))
        return self._change(transaction, None) if transaction.ops else None

    def revert(self, change: Change) -> None:
        """Take back the last change that was not yet taken back, because its commit failed.

        Raises:
            ValueError: It is not the last one.
        """
        if change.serial != self._last_serial:
            raise ValueError("changes are taken back last first, and once")
        nodes = dict(change.nodes)
        for op in change.undo:
            self._state.apply(op, nodes, [])
        self._last_serial = change.previous

    def attach_hashes(
        self, node_id: int, hashes: Sequence[BlockHash], tail_key: BlockHash | None
    ) -> None:
        """Say which blocks hold a loaded node's log; ancestors that lack theirs get them too.

        Until then its keys count as not retained. Calling it again replaces the tail key.

        Args:
            node_id: The node.
            hashes: All full-block hashes of its log, from position 0.
            tail_key: Partial key of the unfilled block at its end, None for none.

        Raises:
            NodeNotFound: There is no such node.
            ValueError: There are fewer hashes than full blocks.
        """
        node = self._node(node_id)
        self._check_hashes(hashes, node.end // self._block_size)
        self._state.attach(node, hashes, self._block_size)
        self._state.attach_tail(node, tail_key)

    def _new_node(
        self, new: NewNode, parent: Node | None, node_id: int, *, tenant: str, now: float
    ) -> Node:
        """The node in memory, not yet in the tree."""
        if node_id in self._state.nodes or not 0 < node_id <= self._next_node_id:
            raise ValueError(f"node id {node_id} was not reserved or is in use")
        start = 0 if parent is None else parent.end
        full_blocks = (start + len(new.token_ids)) // self._block_size
        if new.hashes is not None:
            self._check_hashes(new.hashes, full_blocks)
        record = NodeRecord(
            node_id=node_id,
            parent_id=None if parent is None else parent.record.node_id,
            kind=new.kind,
            token_ids=pack_tokens(new.token_ids),
            num_incoming_tokens=new.num_incoming_tokens,
            num_messages=new.num_messages,
            incoming_blob=new.incoming_blob,
            reply_blob=new.reply_blob,
            finish_reason=new.finish_reason,
            closed=new.closed,
            sampling_blob=new.sampling_blob,
            tokenizer_digest=new.tokenizer_digest,
            template_digest=new.template_digest,
            chain_hash=new.hashes[full_blocks - 1]
            if new.hashes and full_blocks
            else BlockHash(b""),
            created_s=now,
            num_unwritten_tokens=new.num_unwritten_tokens,
        )
        node = Node(record, parent, tenant)
        if new.hashes is not None:
            node.hashes = tuple(new.hashes[start // self._block_size : full_blocks])
            node.tail, node.tail_known = new.tail_key, True
        return node

    def _check_hashes(self, hashes: Sequence[BlockHash], full_blocks: int) -> None:
        if len(hashes) < full_blocks:
            raise ValueError(f"{len(hashes)} hashes for a log of {full_blocks} full blocks")

    def _on_path(self, node: Node, node_id: int) -> Node:
        """The ancestor of that id, ``node`` included."""
        for ancestor in node.up():
            if ancestor.record.node_id == node_id:
                return ancestor
        raise no_node(node_id)

    def _check_new_name(self, field: str, name: str) -> None:
        if is_unnamed(name):
            raise InvalidRequest(field, name, f"a name that does not begin with {UNNAMED_PREFIX}")
        if self.num_sessions >= self._limits.sessions:
            raise Overloaded(
                f"there are {self.num_sessions} sessions, as many as may be; delete some",
                retry_after_s=60.0,
                sessions=self.num_sessions,
            )

    def _check_key(self, key: KeyRecord, now: float) -> None:
        if self.find_key(key.tenant, key.key, now=now) is not None:
            raise IdempotencyConflict(f"the idempotency key {key.key!r} was used before")

    def _add_key(self, transaction: Transaction, key: KeyRecord) -> None:
        """Put the key in place of one that ran out, and the oldest out where there are too many."""
        keys = self._state.keys
        if (key.tenant, key.key) in keys:
            transaction.do(DeleteKey(key.tenant, key.key))
        while len(keys) >= self._limits.idempotency_keys:
            transaction.do(DeleteKey(*next(iter(keys))))
        transaction.do(PutKey(key))

    def _branch(self, tenant: str, node: Node, history: str, now: float) -> Change:
        stem = name = UNNAMED_PREFIX + format_node_id(node.record.node_id)
        count = 1
        while (tenant, name) in self._state.heads:
            count += 1
            name = f"{stem}.{count}"
        head = _fresh_head(tenant, name, node, history, now)
        transaction = Transaction(self._state)
        # The new head first: it may keep nodes that the oldest would take along.
        transaction.do(PutHead(head))
        while len(self._state.unnamed) > self._max_unnamed:
            self._delete_head(transaction, next(iter(self._state.unnamed.values())))
        return self._change(transaction, head)

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
        self, transaction: Transaction, head: HeadRecord | None, added: Node | None = None
    ) -> Change:
        """Close the transaction: it gets its place in the order of changes."""
        if added is not None:
            self._next_node_id = max(self._next_node_id, added.record.node_id + 1)
        previous = self._last_serial
        self._serials += 1
        self._last_serial = self._serials
        return Change(
            ops=tuple(transaction.ops),
            head=head,
            node_id=None if added is None else added.record.node_id,
            freed_node_ids=transaction.freed_node_ids(),
            freed_keys=transaction.freed_keys(),
            serial=self._last_serial,
            previous=previous,
            undo=tuple(reversed(transaction.undo)),
            nodes=transaction.nodes,
        )


def _fresh_head(tenant: str, name: str, node: Node, history: str, now: float) -> HeadRecord:
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


def _leading(records: Iterable[_R], stamp: str, until_s: float) -> list[_R]:
    """Records at the front of a queue that are not younger than ``until_s``, at most a batch."""
    ended = takewhile(lambda record: getattr(record, stamp) <= until_s, records)
    return list(islice(ended, EXPIRE_BATCH))
