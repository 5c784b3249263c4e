"""Values of the tree of turns: nodes in memory, drafts of new ones, changes, and node ids.

Tokens, blobs and digests are opaque here, and so are block keys: nothing in this file hashes,
tokenises or reads a clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sessionkv.cache.retention import Pin
from sessionkv.errors import InvalidRequest
from sessionkv.types import TOKEN_BYTES, BlockHash, HeadRecord, JournalOp, NodeRecord
from sessionkv.types.node_ids import number_of

HeadId = tuple[str, str]
"""Tenant and name of a session."""

UNNAMED_PREFIX = "~"
"""Begins the name of a session that runs out by itself."""
BRANCH_PREFIX = "~n-"
"""Begins those that the tree gives."""
_HAS_BUDGET = 1 << 31
NODE_BYTES = 1024
"""About what a node takes in memory beside its tokens and blobs."""
_NODE_ID = re.compile(r"n-([1-9][0-9]{0,17})", re.ASCII)


def format_node_id(node_id: int) -> str:
    """External form of a node id: ``n-42``; the number in its row, which its tenant alone has."""
    return f"n-{number_of(node_id)}"


def parse_node_id(text: str) -> int:
    """The number of a node id that :func:`format_node_id` gave.

    Raises:
        InvalidRequest: The text is not a node id.
    """
    found = _NODE_ID.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise InvalidRequest("node", text, "a node id such as n-42")
    return int(found[1])


@dataclass(frozen=True, slots=True)
class NewNode:
    """A node to be added; the tree gives it its id, parent and time.

    Attributes:
        kind: ``"chat"`` or ``"raw"``; ``"root"`` for the root of a session.
        token_ids: Delta ids, incoming ones first, then the reply.
        hashes: Full-block hashes of the whole log from position 0 to this node's end, as the chain
            has them (any past the end are ignored); only the node's own part is copied. None where
            they are not known: its blocks are then not retained until they are attached.
        tail_key: Partial key of the unfilled block whose KV was written for this node's end, or
            None where there is none.

    The other fields are those of :class:`~sessionkv.types.records.NodeRecord`.
    """

    kind: str
    token_ids: Sequence[int]
    num_incoming_tokens: int
    hashes: Sequence[BlockHash] | None
    tail_key: BlockHash | None = None
    num_messages: int = 0
    incoming_blob: bytes = b""
    reply_blob: bytes = b""
    finish_reason: str = ""
    closed: bool = False
    sampling_blob: bytes = b""
    tokenizer_digest: str = ""
    template_digest: str = ""
    num_unwritten_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Opening:
    """What a client said when it opened a session; None is: not said.

    Attributes:
        system: Opaque bytes that stand for the system prompt; best a digest.
        tools: Opaque bytes that stand for the tools; best a digest.
        history: ``"keep"`` or ``"follow"``; ``"keep"`` when a new session does not say.
        budget_bytes: Most KV that is retained of the session, from its start on; a fork inherits
            it. A new session that does not say has no limit.
    """

    system: bytes | None = None
    tools: bytes | None = None
    history: str | None = None
    budget_bytes: int | None = None

    def to_blob(self) -> bytes:
        """Kept as the root's ``sampling_blob``.

        4 bytes, little-endian: the length of the system's, and in the highest bit whether there is
        a budget; the budget, 8 bytes; system; tools.
        """
        system, budget = self.system or b"", b""
        length = len(system)
        if self.budget_bytes is not None:
            length |= _HAS_BUDGET
            budget = self.budget_bytes.to_bytes(8, "little")
        return length.to_bytes(4, "little") + budget + system + (self.tools or b"")

    @classmethod
    def of_blob(cls, blob: bytes) -> Opening:
        """What :meth:`to_blob` kept; without history."""
        length, start, budget = int.from_bytes(blob[:4], "little"), 4, None
        if length & _HAS_BUDGET:
            start, budget = 12, int.from_bytes(blob[4:12], "little")
        end = start + length % _HAS_BUDGET
        return cls(blob[start:end], blob[end:], budget_bytes=budget)

    def differs_from(self, blob: bytes, history: str) -> str | None:
        """Name of the first thing said here that is not as in ``blob`` and ``history``."""
        was = self.of_blob(blob)
        if self.system not in (None, was.system):
            return "system"
        if self.tools not in (None, was.tools):
            return "tools"
        if self.budget_bytes not in (None, was.budget_bytes):
            return "budget_bytes"
        return "history" if self.history not in (None, history) else None


class Node:
    """One turn in memory: the record and what follows from its place in the tree.

    Attributes:
        start: Position of its first token in the log.
        end: Position after its last token.
        depth: Turns from the root to here; 0 for a root.
        tenant: Whose it is.
        budget_bytes: Most KV that is retained of its session, None for no limit; the root's.
        hashes: Hashes of the full blocks that end within it, None until attached.
        num_kept: How many of them are within the budget.
        keeps_tail: Whether the block behind them is.
        tail: Partial key at its end, None when unknown or none.
        tail_known: Whether ``tail`` was ever given.
        heads: Heads on it, those that are not in memory too.
        children: Nodes whose parent it is, those that are not in memory too.
        held: What keeps it in memory: heads on it and children of it that are there, and changes
            on their way to the journal.
        pins: For each tier and priority, how many heads that are pinned so reach it.
    """

    __slots__ = (
        "budget_bytes", "children", "depth", "end", "hashes", "heads", "held", "keeps_tail",
        "num_kept", "parent", "pins", "record", "start", "tail", "tail_known", "tenant",
    )  # fmt: skip

    def __init__(self, record: NodeRecord, parent: Node | None, tenant: str) -> None:
        """Place the record under ``parent``; counts start at 0 and hashes unknown."""
        self.record = record
        self.parent = parent
        self.tenant = tenant
        self.start: int = 0 if parent is None else parent.end
        self.end: int = self.start + len(record.token_ids) // TOKEN_BYTES
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.budget_bytes: int | None
        if parent is not None:
            self.budget_bytes = parent.budget_bytes
        else:
            self.budget_bytes = Opening.of_blob(record.sampling_blob).budget_bytes
        self.num_kept = 0
        self.keeps_tail = True
        self.hashes: tuple[BlockHash, ...] | None = None
        self.tail: BlockHash | None = None
        self.tail_known = False
        self.heads = 0
        self.children = 0
        self.held = 0
        self.pins: dict[Pin, int] = {}

    @property
    def keys(self) -> tuple[BlockHash, ...]:
        """Block keys it owns: its full blocks, and its tail while a head is on it.

        Those within the budget. Once a child continues the log, the child's blocks hold the tail's
        tokens too.
        """
        return (*self.kept, *self.kept_tail) if self.heads else self.kept

    @property
    def kept(self) -> tuple[BlockHash, ...]:
        """Its full blocks that are within the budget."""
        return (self.hashes or ())[: self.num_kept]

    @property
    def kept_tail(self) -> tuple[BlockHash, ...]:
        """Its tail, if it has one and that is within the budget."""
        return () if self.tail is None or not self.keeps_tail else (self.tail,)

    @property
    def tail_part(self) -> int:
        """Number of :attr:`kept_tail` as a part of its own; that of :attr:`kept` is the node's."""
        return -self.record.node_id

    @property
    def excess(self) -> tuple[BlockHash, ...]:
        """Its full blocks that are not: nobody retains them for its sake."""
        return (self.hashes or ())[self.num_kept :]

    def take_hashes(
        self, hashes: Sequence[BlockHash], *, block_size: int, block_bytes: int
    ) -> None:
        """Take its part of the log's hashes, from position 0; blocks count from the log's start."""
        first, end = self.start // block_size, self.end // block_size
        self.hashes = tuple(hashes[first:end])
        budget = end + 1 if self.budget_bytes is None else self.budget_bytes // block_bytes
        self.num_kept = max(0, min(budget, end) - first)
        # The tail lies where KV ends, which may be in the last full block of the log.
        self.keeps_tail = budget > (self.end - self.record.num_unwritten_tokens) // block_size

    @property
    def num_bytes(self) -> int:
        """About what it takes in memory."""
        record = self.record
        blobs = (record.token_ids, record.incoming_blob, record.reply_blob, record.sampling_blob)
        return NODE_BYTES + sum(map(len, blobs))

    def up(self) -> Iterator[Node]:
        """This node, its parent, and so on to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class Change:
    """What one operation did: already true in memory, to be committed as one transaction.

    Attributes:
        ops: The transaction; empty when there is nothing to write.
        head: The head concerned as it now is; None when it was deleted or none is concerned.
        node_id: The node that was added, None if none was.
        freed_node_ids: Nodes that nothing reaches any more, children before parents.
        freed_keys: Block keys to be dropped in every tier, at once or when their last lease ends;
            the end of a chain before its start.
            Of a deleted head everything that no node owns any more, else only tails: full blocks
            that a rewind or an edit lets go stay as cold cache, so that the same turn asked again
            finds them, and are no longer retained.
        serial: For :meth:`TurnTree.revert`: changes are taken back last first.
        previous: Serial of the change before.
        undo: Inverse of ``ops``, in the order to apply.
        nodes: Nodes that ``ops`` or ``undo`` put or delete, with their derived data.
        touched: Nodes that have to stay in memory until the change is settled.
        heads: Heads that have to.
    """

    ops: tuple[JournalOp, ...]
    head: HeadRecord | None
    node_id: int | None
    freed_node_ids: tuple[int, ...]
    freed_keys: tuple[BlockHash, ...]
    serial: int
    previous: int
    undo: tuple[JournalOp, ...] = field(repr=False)
    nodes: Mapping[int, Node] = field(repr=False)
    touched: tuple[Node, ...] = field(repr=False)
    heads: tuple[HeadId, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """Block keys of one session's log, root first: its own, and those it shares with others."""

    exclusive: tuple[BlockHash, ...]
    shared: tuple[BlockHash, ...]
