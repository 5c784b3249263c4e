"""The durable tree of turns: sessions are heads on it; fork, rewind and edit move heads.

A node is one immutable turn; it lives while a head or a child reaches it. Each operation checks
everything first and raises with nothing moved; then it changes memory and returns a
:class:`~sessionkv.cache.turns.Change` whose ``ops`` are one transaction of the journal. The caller
commits them before it acknowledges anything, and if that fails hands the change to
:meth:`TurnTree.revert`, last change first.

In memory are the sessions in use alone: before an operation names one, the caller sees that the
tree :meth:`~TurnTree.knows` it, or has it looked up (:meth:`~TurnTree.take_in`). Idempotency keys
are never here.

Kept here: a session taken in from the journal is as it was in memory; the keys a session retains
are those its nodes own; ids ascend and are never used twice. Not known here: text, hashing, places
of blocks, which turns are running (the caller's to guard), and the time, which is always an
argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sessionkv.cache.retention import Retention
from sessionkv.cache.tree_checks import check_name
from sessionkv.cache.tree_heads import MAX_UNNAMED, TreeHeads, fresh_head
from sessionkv.cache.tree_state import Transaction
from sessionkv.cache.turns import Change, NewNode, Node, Opening
from sessionkv.config import LimitsConfig
from sessionkv.errors import InvalidRequest, SessionBusy, SessionDiffers
from sessionkv.types import (
    BlockHash,
    JournalSummary,
    KeyRecord,
    NodeRecord,
    PutHead,
    PutKey,
    pack_tokens,
)
from sessionkv.types.portable_tree import PortableTree

__all__ = ["Change", "NewNode", "Opening", "TurnTree"]

EMPTY_JOURNAL = JournalSummary((), 1, (), 0)


class TurnTree(TreeHeads):
    """Sessions and turns. One thread."""

    def __init__(
        self,
        limits: LimitsConfig,
        retention: Retention,
        *,
        block_size: int,
        journal: JournalSummary = EMPTY_JOURNAL,
        max_unnamed: int = MAX_UNNAMED,
    ) -> None:
        """Nothing of the journal is in memory; see :meth:`take_in`."""
        super().__init__(limits, retention, journal, max_unnamed=max_unnamed)
        self._block_size = block_size

    def open(
        self, tenant: str, name: str, *, root: NewNode, opening: Opening, now: float
    ) -> Change:
        """Create a session with its root node, or resume one (then there is nothing to journal).

        Raises:
            InvalidRequest: The name, or the history policy, is not allowed.
            SessionDiffers: It exists, and something said in ``opening`` is not as it is.
            Overloaded: There are as many sessions as may be, and the tenant has its share.
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
        self._check_free((tenant, name))
        self._check_new_name(tenant, "session", name)
        root = replace(root, kind="root", sampling_blob=opening.to_blob())
        node = self._new_node(root, None, self.reserve_node_id(tenant), tenant=tenant, now=now)
        head = fresh_head(tenant, name, node, opening.history or "keep", now)
        transaction = Transaction(self._state)
        transaction.add_node(node)
        transaction.do(PutHead(head, is_new=True))
        return self._change(transaction, head, node_id=head.node_id)

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
        """
        head = self.head(tenant, name)
        if head.node_id != base_id:
            raise SessionBusy("the session has moved on since this turn began")
        before = self._state.nodes[base_id]
        parent = before if parent_id is None else self._on_path(before, parent_id)
        if new.kind not in ("chat", "raw"):
            raise InvalidRequest("kind", new.kind, "chat or raw")
        self.check_kind(parent.record.node_id, new.kind)
        if node_id is None:
            node_id = self.reserve_node_id(tenant)
        node = self._new_node(new, parent, node_id, tenant=tenant, now=now)
        moved = replace(head, node_id=node.record.node_id, updated_s=now)
        if new.hashes is not None:
            self._state.attach(parent, new.hashes, self._block_size)
        transaction = Transaction(self._state)
        transaction.add_node(node)
        transaction.do(PutHead(moved))
        transaction.free_from(before)
        if key is not None:
            self._add_key(transaction, key, now)
        return self._change(transaction, moved, node_id=moved.node_id)

    def graft(self, tenant: str, tree: PortableTree) -> Change:
        """Add turns and sessions from elsewhere; hashes are unknown until attached. O(turns).

        Raises:
            InvalidRequest: A name is not allowed, or no session leads to one of the turns.
            SessionExists: A name is taken.
            Overloaded: There would be more sessions than may be.
        """
        for session in tree.sessions:
            check_name("name", session.name, self._limits.session_name_bytes)
            self._check_free((tenant, session.name))
            self._check_new_name(tenant, "name", session.name, beside=len(tree.sessions) - 1)
        records, heads = tree.placed(tenant, self._ids.reserve(tenant, len(tree.nodes)))
        transaction = Transaction(self._state)
        for record in records:
            parent = None if record.parent_id is None else self._state.nodes[record.parent_id]
            transaction.add_node(Node(record, parent, tenant))
        for head in heads:
            transaction.do(PutHead(head, is_new=True))
        return self._change(transaction, None)

    def record_key(self, key: KeyRecord, *, now: float) -> Change:
        """Keep the answer of a generation under its idempotency key."""
        transaction = Transaction(self._state)
        self._add_key(transaction, key, now)
        return self._change(transaction, None)

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
        if node_id in self._state.nodes or not self._ids.was_given(node_id):
            raise ValueError(f"node id {node_id} was not reserved or is in use")
        start = 0 if parent is None else parent.end
        full_blocks = (start + len(new.token_ids)) // self._block_size
        if new.hashes is not None:
            self._check_hashes(new.hashes, full_blocks)
        last_hash = new.hashes[full_blocks - 1] if new.hashes and full_blocks else BlockHash(b"")
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
            chain_hash=last_hash,
            created_s=now,
            num_unwritten_tokens=new.num_unwritten_tokens,
        )
        node = Node(record, parent, tenant)
        if new.hashes is not None:
            block_bytes = self.retention.block_bytes
            node.take_hashes(new.hashes, block_size=self._block_size, block_bytes=block_bytes)
            node.tail, node.tail_known = new.tail_key, True
        return node

    def _check_hashes(self, hashes: Sequence[BlockHash], full_blocks: int) -> None:
        if len(hashes) < full_blocks:
            raise ValueError(f"{len(hashes)} hashes for a log of {full_blocks} full blocks")

    def _add_key(self, transaction: Transaction, key: KeyRecord, now: float) -> None:
        """Keys are the journal's alone: it replaces, forgets the oldest and looks them up."""
        transaction.journal(PutKey(key))
        transaction.journal(self._forget_keys(now))
