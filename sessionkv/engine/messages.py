"""What front and core say to each other: frozen plain data, token ids and opaque bytes.

Core never reads a blob; front never sees a block. Turns are named by ``turn_id`` and calls by
``call_id``, both chosen by the front and unique for the life of the engine. Each
:class:`SubmitTurn` is answered by exactly one of :class:`TurnCommitted`, :class:`TurnReplayed`
and :class:`TurnDropped`; each call by exactly one :class:`CallDone`.

A turn in order::

    front -> core   SubmitTurn
    core -> front   RenderTurn            (chat turns, once the head is free)
    front -> core   TurnRendered | TurnRefused
    core -> front   TurnProgress ...      (where somebody asked; the first before any token)
    core -> front   StepTokens ...        (one message a step, all turns together)
    front -> core   StopAt                (a stop string was found; core goes on until it arrives)
    core -> front   TurnFinished          (what ran, where it would be journalled, what it cost)
    front -> core   Verdict               (what of it the log keeps)
    core -> front   TurnCommitted         (journalled: the terminal event may go out)

A turn that is not kept (:attr:`SubmitTurn.is_kept`) is not judged, and waits for no journal: core
says TurnCommitted right behind TurnFinished, in the same batch, and there is no Verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sessionkv.errors import SessionKVError
from sessionkv.ipc.messages import Request
from sessionkv.types import (
    CacheReport,
    FinishReason,
    MissReport,
    NodeRecord,
    SamplingParams,
    TokenLogprob,
)
from sessionkv.types.access import Access
from sessionkv.types.portable import PortableSession


@dataclass(frozen=True, slots=True)
class KeyClaim:
    """An idempotency key and the digest of the request it stands for."""

    key: str
    request_digest: bytes


@dataclass(frozen=True, slots=True)
class SubmitTurn:
    """Run a turn.

    Attributes:
        session: None for a generation without session.
        token_ids: The delta (raw turns) or whole prompt (generations); None when the front has to
            render against the head first.
        num_messages: Incoming messages; 0 for raw turns.
        incoming_blob: Opaque, journalled with the node.
        sampling_blob: Opaque, journalled with the node.
        sampling: Validated; the seed is set.
        stop_token_ids: Ids that end the turn.
        deadline_s: Seconds from now, None for no deadline.
        use_cache: False computes everything (and stores nothing).
        claim: Its idempotency key, None without one.
        wants_progress: Somebody hears how far its prompt is (:class:`TurnProgress`).
        prompt_logprobs: See :class:`~sessionkv.types.SequenceStart`.
        changed_from: Session whose conversation this one was before it was changed, None for none.
    """

    turn_id: int
    tenant: str
    session: str | None
    token_ids: Sequence[int] | None
    num_messages: int
    incoming_blob: bytes
    sampling_blob: bytes
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    queue_when_busy: bool = False
    priority: int = 0
    deadline_s: float | None = None
    use_cache: bool = True
    claim: KeyClaim | None = None
    wants_progress: bool = False
    prompt_logprobs: int | None = None
    changed_from: str | None = None

    @property
    def reads_cache(self) -> bool:
        """Whether what is cached of its prompt is used; not where all of it is to be computed."""
        return self.use_cache and self.prompt_logprobs is None

    @property
    def is_kept(self) -> bool:
        """Whether something of it is journalled: a turn of its session, or its key's answer."""
        return self.session is not None or self.claim is not None


@dataclass(frozen=True, slots=True)
class NodeText:
    """One turn of a path, as the front stored it."""

    node_id: int
    kind: str
    incoming_blob: bytes
    reply_blob: bytes
    token_ids: Sequence[int]
    num_incoming_tokens: int
    closed: bool


@dataclass(frozen=True, slots=True)
class RenderTurn:
    """The head is free and locked for this turn: say which ids to add to it.

    Attributes:
        root_id: Node of system prompt and tools; ``root_blob`` is its incoming blob.
        num_turns: Turns from the root to the head.
        closed: The head's log ends with the template's own end of turn.
        history: ``"keep"`` or ``"follow"``.
        created_s: When the session was opened; clocks in templates stand still there.
        path: Root to head, where the front asked for it by :class:`PathWanted` or must have it.
        foreign: The log's ids are of another tokenizer: the whole path is encoded anew, once.
        changed_from: Path of the conversation that this one was, where the session has no turn yet.
    """

    turn_id: int
    root_id: int
    root_blob: bytes
    node_id: int
    num_turns: int
    closed: bool
    history: str
    created_s: float
    path: tuple[NodeText, ...] = ()
    foreign: bool = False
    changed_from: tuple[NodeText, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnRendered:
    """Ids to add after ``base_node_id`` (the head, or an ancestor whose log the prompt shares).

    Attributes:
        known_miss: Where the prompt leaves the stored history, None where it does not.
    """

    turn_id: int
    token_ids: Sequence[int]
    base_node_id: int
    incoming_blob: bytes
    num_messages: int
    known_miss: MissReport | None = None


@dataclass(frozen=True, slots=True)
class PathWanted:
    """The turn needs the head's whole path: send :class:`RenderTurn` again with it."""

    turn_id: int


@dataclass(frozen=True, slots=True)
class TurnRefused:
    """The messages cannot be rendered."""

    turn_id: int
    error: SessionKVError


@dataclass(frozen=True, slots=True)
class StopAt:
    """The turn ends after its first ``num_output_tokens`` sampled tokens."""

    turn_id: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the log keeps of a finished turn.

    Attributes:
        keep_tokens: Sampled tokens kept, from the first.
        replacement_ids: Ids that follow them in the log instead of what was cut.
        closed: The log now ends with the template's own end of turn.
        reply_blob: Opaque, journalled with the node.
        response_blob: Opaque whole answer, journalled under the idempotency key when there is one.
        calls_tool: The reply asks for a tool: the session is likely to be back soon.
    """

    turn_id: int
    keep_tokens: int
    replacement_ids: Sequence[int]
    closed: bool
    finish_reason: FinishReason
    reply_blob: bytes
    response_blob: bytes
    calls_tool: bool = False


@dataclass(frozen=True, slots=True)
class CancelTurn:
    """End a turn; ``keep`` commits what was sampled so far. Unknown turns are ignored.

    Attributes:
        error: What it ends with; None is ``turn_cancelled``.
    """

    turn_id: int
    keep: bool = False
    error: SessionKVError | None = None


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Create or resume a session. Blobs of absent values are None (inherited on resume)."""

    call_id: int
    tenant: str
    session: str
    system_blob: bytes | None
    tools_blob: bytes | None
    root_blob: bytes
    history: str | None
    budget_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ImportSessions:
    """Add turns and sessions from elsewhere, all or none; their texts were checked.

    Attributes:
        nodes: Turns, parents first.
    """

    call_id: int
    tenant: str
    nodes: Sequence[NodeRecord]
    sessions: Sequence[PortableSession]


@dataclass(frozen=True, slots=True)
class Call:
    """Any other request on sessions or the engine, as it came in (validated).

    Attributes:
        operator: It may concern the whole engine, not its tenant alone.
    """

    call_id: int
    tenant: str
    request: Request
    operator: bool = False


@dataclass(frozen=True, slots=True)
class PublicPrefixes:
    """Token ids of prompts that all tenants may share, in addition to those said before.

    Before the first turn that is to share them: sessions that are in memory stay as they are.
    """

    prefixes: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class NewAccess:
    """Keys and quotas from now on: to core, which passes it on to the front."""

    access: Access


@dataclass(frozen=True, slots=True)
class Drain:
    """Accept no new turns; end running ones within ``drain_s``; then stop the step loop.

    May be said again: the earliest end holds.

    Attributes:
        abandoned: Nobody hears of the running turns, or wants to wait for them: they end at once.
    """

    drain_s: float
    abandoned: bool = False


FrontMessage = (
    SubmitTurn
    | TurnRendered
    | PathWanted
    | TurnRefused
    | StopAt
    | Verdict
    | CancelTurn
    | OpenSession
    | ImportSessions
    | Call
    | PublicPrefixes
    | NewAccess
    | Drain
)


class TurnTokens(NamedTuple):
    """New tokens of one turn; a named tuple, as one is made for every token.

    Attributes:
        offset: Number of tokens sampled before them.
        logprobs: One entry a token, empty when not asked for.
        ends_turn: The last of them is an id that ends the turn: no part of its text.
    """

    turn_id: int
    offset: int
    token_ids: Sequence[int]
    logprobs: Sequence[Sequence[TokenLogprob]]
    ends_turn: bool = False


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Everything one step sampled."""

    turns: tuple[TurnTokens, ...]


@dataclass(frozen=True, slots=True)
class TurnProgress:
    """How far a turn's prompt is; when it is admitted, and now and then until its first token.

    The three counts are what its admission found, by tier. They do not change from then on, unless
    the admission comes to nothing and another one finds otherwise. ``device_tokens`` is exact; of
    the other two, what cannot be loaded or is computed sooner counts as computed at the end.

    Attributes:
        done_tokens: Positions of the prompt that hold KV. Never falls.
    """

    turn_id: int
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    done_tokens: int


@dataclass(frozen=True, slots=True)
class TurnFinished:
    """A turn ended by itself, by StopAt or by a keeping cancel.

    Core waits for the verdict, unless nothing of the turn is journalled.

    Attributes:
        num_output_tokens: Tokens sampled that count; all were sent in :class:`StepTokens`.
        stop_token_id: The id that ended it, if one did.
        node_id: Id the turn will be journalled under, None without session.
        prompt_logprobs: Of each token of the prompt but the first, where asked for.
    """

    turn_id: int
    num_output_tokens: int
    reason: FinishReason
    stop_token_id: int | None
    node_id: int | None
    num_prompt_tokens: int
    cache: CacheReport
    prompt_logprobs: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class TurnCommitted:
    """The turn is over, and durable where something of it is journalled."""

    turn_id: int


@dataclass(frozen=True, slots=True)
class TurnReplayed:
    """The idempotency key was used before: the journalled answer."""

    turn_id: int
    response_blob: bytes


@dataclass(frozen=True, slots=True)
class TurnDropped:
    """The turn ended without being committed."""

    turn_id: int
    error: SessionKVError


@dataclass(frozen=True, slots=True)
class CallDone:
    """Answer to a call: a plain value, or an error."""

    call_id: int
    value: Any = None
    error: SessionKVError | None = None


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What a drain left undone.

    Attributes:
        dropped_turns: Turns that did not end in time.
        unwritten_blocks: Blocks of sessions that are not on disk.
        unwritten_bytes: Their size.
        drain_s: The time there was, or less where it ended sooner.
        unanswered_commits: Changes that the journal neither stored nor refused in time; it may
            still store them.
    """

    dropped_turns: int
    unwritten_blocks: int
    unwritten_bytes: int
    drain_s: float
    unanswered_commits: int = 0


@dataclass(frozen=True, slots=True)
class CoreStopped:
    """The step loop ended: after a drain, or with ``error`` where it was not asked to.

    Attributes:
        error: Why it ended without being asked to.
        drained: What a drain left undone.
        undecided: Turns and calls that may be in the journal or not: nothing true can be said of
            them, so they get no answer.
    """

    error: SessionKVError | None = None
    drained: DrainReport | None = None
    undecided: tuple[int, ...] = ()


CoreMessage = (
    RenderTurn
    | TurnProgress
    | StepTokens
    | TurnFinished
    | TurnCommitted
    | TurnReplayed
    | TurnDropped
    | CallDone
    | NewAccess
    | CoreStopped
)
