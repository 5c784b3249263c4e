"""Builders for the tree of turns: a strict journal in memory, chains of made-up hashes, turns."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from sessionkv.cache.retention import Retention
from sessionkv.cache.tree import Change, NewNode, Opening, TurnTree
from sessionkv.config import LimitsConfig
from sessionkv.types import (
    BlockHash,
    DeleteHead,
    DeleteNode,
    ForgetKeys,
    HeadRecord,
    JournalOp,
    JournalSummary,
    KeepIds,
    KeyRecord,
    NodeRecord,
    PutHead,
    PutKey,
    PutNode,
    StoredNode,
    StoredSession,
    TenantSessions,
    Tier,
)
from sessionkv.types.node_ids import row_of

B = 4
TENANT = "local"
BLOCK_BYTES = 100


def full_hashes(token_ids: Sequence[int]) -> list[BlockHash]:
    """One made-up hash for each full block, of everything up to its end."""
    return [_digest("full", token_ids[:end]) for end in range(B, len(token_ids) + 1, B)]


def tail_key(token_ids: Sequence[int]) -> BlockHash | None:
    """Key of the unfilled block when all but the last token have KV."""
    written = token_ids[: max(len(token_ids) - 1, 0)]
    return _digest("tail", written) if len(written) % B else None


def is_tail(key: BlockHash) -> bool:
    return key.startswith(b"tail")


def _digest(kind: str, token_ids: Sequence[int]) -> BlockHash:
    digest = hashlib.sha256(f"{kind}{list(token_ids)}".encode()).digest()
    return BlockHash(kind.encode() + digest[len(kind) :])


def new_turn(history: Sequence[int], delta: Sequence[int], kind: str = "chat") -> NewNode:
    """A turn that adds ``delta`` to the log ``history``."""
    log = [*history, *delta]
    return NewNode(
        kind=kind,
        token_ids=delta,
        num_incoming_tokens=len(delta) // 2,
        hashes=full_hashes(log),
        tail_key=tail_key(log),
        num_messages=2,
        incoming_blob=b"in",
        reply_blob=b"out",
        finish_reason="stop",
        num_unwritten_tokens=1,
    )


ROOT = NewNode(kind="root", token_ids=(), num_incoming_tokens=0, hashes=())


def key_record(key: str, created_s: float, tenant: str = TENANT) -> KeyRecord:
    return KeyRecord(tenant, key, b"digest", b"answer " + key.encode(), created_s)


@dataclass
class DictJournal:
    """What a correct journal does with operations, strictly: a wrong one raises."""

    nodes: dict[int, NodeRecord] = field(default_factory=dict)
    heads: dict[tuple[str, str], HeadRecord] = field(default_factory=dict)
    keys: dict[tuple[str, str], KeyRecord] = field(default_factory=dict)
    next_ids: dict[int, int] = field(default_factory=lambda: {0: 1})

    @property
    def next_node_id(self) -> int:
        return self.next_ids[0]

    def keep_ids(self, next_id: int) -> None:
        row = row_of(next_id)
        self.next_ids[row] = max(self.next_ids.get(row, 0), next_id)

    def commit(self, ops: Sequence[JournalOp]) -> None:
        for op in ops:
            self._apply(op)
        used = {head.node_id for head in self.heads.values()}
        used |= {node.parent_id for node in self.nodes.values() if node.parent_id is not None}
        if used != set(self.nodes):
            raise ValueError(f"reached {sorted(used)}, kept {sorted(self.nodes)}")

    def _apply(self, op: JournalOp) -> None:
        match op:
            case PutNode(node):
                if node.node_id in self.nodes:
                    raise ValueError(f"node {node.node_id} put twice")
                self.nodes[node.node_id] = node
                self.keep_ids(node.node_id + 1)
            case DeleteNode(node_id):
                del self.nodes[node_id]
            case PutHead(head):
                self.heads[head.tenant, head.name] = head
            case DeleteHead(tenant, name):
                del self.heads[tenant, name]
            case PutKey(key):
                self.keys.pop((key.tenant, key.key), None)
                self.keys[key.tenant, key.key] = key
            case ForgetKeys(created_until_s, keep):
                for key_id, record in list(self.keys.items()):
                    if record.created_s <= created_until_s or len(self.keys) > keep:
                        del self.keys[key_id]
            case KeepIds(next_node_id):
                self.keep_ids(next_node_id)
            case _:
                raise ValueError(f"{op} is for a damaged journal")

    def summary(self) -> JournalSummary:
        tenants = dict.fromkeys(tenant for tenant, _ in self.heads)
        pinned = tuple(head_id for head_id, head in self.heads.items() if head.pin_tier)
        return JournalSummary(
            tuple(self.sessions_of(tenant) for tenant in tenants),
            self.next_node_id,
            pinned,
            len(self.heads),
            tuple(next_id for row, next_id in self.next_ids.items() if row),
        )

    def sessions_of(self, tenant: str) -> TenantSessions:
        names = [name for of, name in self.heads if of == tenant]
        unnamed = sum(name.startswith("~") for name in names)
        return TenantSessions(tenant, len(names) - unnamed, unnamed)

    def find(self, head_id: tuple[str, str]) -> StoredSession | None:
        head = self.heads.get(head_id)
        if head is None:
            return None
        chain = []
        node_id: int | None = head.node_id
        while node_id is not None:
            record = self.nodes[node_id]
            heads = sum(other.node_id == node_id for other in self.heads.values())
            children = sum(other.parent_id == node_id for other in self.nodes.values())
            chain.append(StoredNode(record, heads, children))
            node_id = record.parent_id
        return StoredSession(head, tuple(reversed(chain)))

    def due_unnamed(self, until_s: float, keep: int) -> list[tuple[str, str]]:
        heads = [head for head in self.heads.values() if head.name.startswith("~")]
        heads.sort(key=lambda head: head.updated_s)
        excess = len(heads) - keep
        return [
            (head.tenant, head.name)
            for number, head in enumerate(heads)
            if number < excess or head.updated_s <= until_s
        ]


class Sessions:
    """A tree with its journal: every change is committed at once."""

    def __init__(self, limits: LimitsConfig | None = None, *, max_unnamed: int = 100_000) -> None:
        self.limits = limits or LimitsConfig()
        self.max_unnamed = max_unnamed
        self.caps = {Tier.DEVICE: 1000, Tier.HOST: 2000, Tier.DISK: 100_000}
        self.journal = DictJournal()
        self.tree = self.fresh_tree()

    def fresh_tree(self) -> TurnTree:
        """A tree with nothing of the journal in memory."""
        return TurnTree(
            self.limits,
            Retention(block_bytes=BLOCK_BYTES, caps=self.caps),
            block_size=B,
            journal=self.journal.summary(),
            max_unnamed=self.max_unnamed,
        )

    def whole_tree(self, *, attached: bool = True) -> TurnTree:
        """A tree with all of the journal in memory."""
        tree = self.fresh_tree()
        for head_id in self.journal.heads:
            tree.take_in(head_id, self.journal.find(head_id))
        if attached:
            attach_all(tree)
        return tree

    def restart(self) -> None:
        """Forget memory and take everything in, hashes included."""
        self.tree = self.whole_tree()

    def look_up(self, name: str) -> None:
        """Have a session in memory, hashes included, or know that there is none."""
        head_id = (TENANT, name)
        if not self.tree.knows(head_id):
            self.tree.take_in(head_id, self.journal.find(head_id))
            attach_all(self.tree)

    def commit(self, change: Change) -> Change:
        self.journal.commit(change.ops)
        self.tree.settle(change)
        return change

    def open(self, name: str, now: float = 1.0, **said: bytes | str) -> Change:
        opening = Opening(**said)  # type: ignore[arg-type]
        return self.commit(self.tree.open(TENANT, name, root=ROOT, opening=opening, now=now))

    def turn(self, name: str, delta: Sequence[int], *, now: float = 2.0, **more: object) -> Change:
        return self.commit(self.begin_turn(name, delta, now=now, **more))

    def begin_turn(
        self,
        name: str,
        delta: Sequence[int],
        *,
        now: float = 2.0,
        kind: str = "chat",
        **more: object,
    ) -> Change:
        """The change of a turn, not yet in the journal."""
        base = self.tree.head(TENANT, name).node_id
        history = self.tree.tokens_of(more.get("parent_id") or base)  # type: ignore[arg-type]
        new = new_turn(history, delta, kind)
        return self.tree.append_turn(TENANT, name, new, base_id=base, now=now, **more)  # type: ignore[arg-type]

    def tokens(self, name: str) -> list[int]:
        return self.tree.tokens_of(self.tree.head(TENANT, name).node_id)


def attach_all(tree: TurnTree) -> None:
    for head in tree.unattached():
        log = tree.tokens_of(head.node_id)
        tree.attach_hashes(head.node_id, full_hashes(log), tail_key(log))


def snapshot(tree: TurnTree) -> dict[str, object]:
    """All there is in a tree, retention included, in comparable form."""
    state, retention = tree._state, tree.retention
    return {
        "nodes": {
            node_id: (
                node.record,
                node.parent and node.parent.record.node_id,
                (node.start, node.end, node.depth, node.tenant, node.heads, node.children),
                dict(node.pins),
                node.keys,
            )
            for node_id, node in state.nodes.items()
        },
        "heads": dict(state.heads),
        "counts": (state.named.total, state.unnamed.total),
        "owners": dict(retention._owners),
        "pins": {tier: dict(pins) for tier, pins in retention._pins.items()},
    }
