"""What the journal keeps: turns (nodes), heads and idempotency keys, and the changes to them.

The pure tree in ``sessionkv.cache`` emits lists of :data:`JournalOp`; the store commits each list
as one transaction. What the journal answers about them is here too: the tree holds only the
sessions that are in use. Blobs are opaque here: text belongs to the front.
"""

from __future__ import annotations

from dataclasses import dataclass

from sessionkv.types.blocks import BlockHash


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One immutable turn. The root of a session is a node without reply.

    Attributes:
        node_id: Unique in the store, ascending in its row, never reused.
        parent_id: The turn before, None for a root.
        kind: ``"root"``, ``"chat"`` or ``"raw"``.
        token_ids: Delta ids, incoming ones first, then the reply, as unsigned 32-bit
            little-endian bytes.
        num_incoming_tokens: How many of them are incoming.
        num_messages: Messages of this node, the reply included (1 for raw turns, which have no
            other; of a root 1 where it has a system prompt or tools).
        incoming_blob: Opaque: what the client sent (messages, system, tools).
        reply_blob: Opaque: the reply as the client saw it.
        finish_reason: Value of :class:`~sessionkv.types.reports.FinishReason`, ``""`` for a root.
        closed: The last token id is the template's own end of turn.
        sampling_blob: Opaque: parameters the turn ran with.
        tokenizer_digest: Digest of the tokenizer the ids belong to.
        template_digest: Digest of the chat template.
        chain_hash: Chain hash at the last full block at or before the node's end.
        created_s: Wall-clock seconds.
        num_unwritten_tokens: Tokens at the end whose KV was never computed when the turn ended (the
            last sampled one, and ids put in place of a cut); they are no miss of the next turn.
    """

    node_id: int
    parent_id: int | None
    kind: str
    token_ids: bytes
    num_incoming_tokens: int
    num_messages: int
    incoming_blob: bytes
    reply_blob: bytes
    finish_reason: str
    closed: bool
    sampling_blob: bytes
    tokenizer_digest: str
    template_digest: str
    chain_hash: BlockHash
    created_s: float
    num_unwritten_tokens: int = 1


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """A session: a tenant's name for a node, with its retention.

    Attributes:
        pin_tier: Value of :class:`~sessionkv.types.blocks.Tier`, or ``""`` when not pinned.
        pin_expires_s: Wall-clock seconds, None for no end.
        history: ``"keep"`` or ``"follow"``: how incoming histories are read.
    """

    tenant: str
    name: str
    node_id: int
    pin_tier: str
    pin_expires_s: float | None
    pin_priority: int
    history: str
    created_s: float
    updated_s: float


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """An idempotency key with the whole answer, so that a retry replays it exactly."""

    tenant: str
    key: str
    request_digest: bytes
    response_blob: bytes
    created_s: float


@dataclass(frozen=True, slots=True)
class PutNode:
    """Add a node (never a change of one)."""

    node: NodeRecord


@dataclass(frozen=True, slots=True)
class DeleteNode:
    """Remove a node that no head or child reaches."""

    node_id: int


@dataclass(frozen=True, slots=True)
class PutHead:
    """Add or replace a head.

    Attributes:
        is_new: It replaces none: where there is one of its name nothing is written.
    """

    head: HeadRecord
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class DeleteHead:
    """Remove a head by name."""

    tenant: str
    name: str


@dataclass(frozen=True, slots=True)
class DropSession:
    """Remove a head of which not every node can be read, and all nodes it alone reaches."""

    tenant: str
    name: str


@dataclass(frozen=True, slots=True)
class PutKey:
    """Add an idempotency key, in place of one of the same name."""

    key: KeyRecord


@dataclass(frozen=True, slots=True)
class DeleteKey:
    """Forget one idempotency key."""

    tenant: str
    key: str


@dataclass(frozen=True, slots=True)
class ForgetKeys:
    """Forget idempotency keys: some that ran out, and all past ``keep``.

    Attributes:
        created_until_s: Those made by then have run out.
        keep: Most keys that may be left; the oldest go of the tenant that has most.
    """

    created_until_s: float
    keep: int


@dataclass(frozen=True, slots=True)
class KeepIds:
    """Node ids of its row below ``next_node_id`` were given and are not given again."""

    next_node_id: int


JournalOp = (
    PutNode
    | DeleteNode
    | PutHead
    | DeleteHead
    | DropSession
    | PutKey
    | DeleteKey
    | ForgetKeys
    | KeepIds
)


@dataclass(frozen=True, slots=True)
class JournalState:
    """Everything in the journal, nodes by ascending id (parents first)."""

    nodes: tuple[NodeRecord, ...]
    heads: tuple[HeadRecord, ...]
    keys: tuple[KeyRecord, ...]
    next_node_id: int


@dataclass(frozen=True, slots=True)
class TenantSessions:
    """How many heads a tenant has.

    Attributes:
        num_named: Those that have a name of their own.
        num_unnamed: Those that run out by themselves: their names begin with ``~``.
    """

    tenant: str
    num_named: int
    num_unnamed: int


@dataclass(frozen=True, slots=True)
class JournalSummary:
    """What is known of a journal when it is opened: counts, and which heads are pinned.

    Attributes:
        tenants: Those that have any heads, as far as it is known whose those are.
        next_node_id: Lowest id of the first row that was never given.
        pinned: Tenant and name of every pinned head.
        num_sessions: Heads of all tenants, those that cannot be read too.
        other_next_ids: The same of the other rows that have any; see ``node_ids``.
        first_number: With which rows begin.
    """

    tenants: tuple[TenantSessions, ...]
    next_node_id: int
    pinned: tuple[tuple[str, str], ...]
    num_sessions: int
    other_next_ids: tuple[int, ...] = ()
    first_number: int = 1


@dataclass(frozen=True, slots=True)
class StoredNode:
    """A node with how many heads are on it and how many nodes follow it, in the whole journal."""

    record: NodeRecord
    heads: int
    children: int


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A head and its nodes, root first; without nodes where one of them cannot be read.

    Attributes:
        damage: What cannot be read, ``""`` where all could.
    """

    head: HeadRecord
    nodes: tuple[StoredNode, ...]
    damage: str = ""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A head as a list shows it.

    Attributes:
        kind: Of its node.
        num_turns: From the root to its node; the root is none.
        num_tokens: Of the log up to its node's end.
    """

    head: HeadRecord
    kind: str
    num_turns: int
    num_tokens: int
