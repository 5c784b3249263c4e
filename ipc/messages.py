"""The closed table of wire messages, as frozen dataclasses.

Clients and the front speak in these; ``codec`` turns them into msgpack maps and back and checks
every limit on the way in. The in-process transport passes the objects themselves. Field names are
the wire's field names; ``None`` and an absent field mean the same. Standard library only.

Every request has ``id``: chosen by the client, an integer from 0 to 2**63 - 1, unique among the
open requests of its connection. Every reply repeats it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sessionkv.errors import SessionKVError, error_from_wire
from sessionkv.types import NodeRecord, SamplingParams
from sessionkv.types.portable import PortableSession

PROTOCOL_VERSION = 1

_DEFAULT_SAMPLING = SamplingParams()

ChatMessage = Mapping[str, Any]
"""``{"role": str, "content": str | list of text parts | None, "tool_calls": [...], ...}``"""
Metadata = Mapping[str, Any]
"""Plain values under names of the client's choice."""
Logprobs = Sequence[Sequence[Sequence[Any]]]
"""For each token a list of ``[token_id, logprob]``, the token itself first."""


@dataclass(frozen=True, slots=True)
class Request:
    """Base of what a client sends."""

    TYPE: ClassVar[str] = ""
    id: int


@dataclass(frozen=True, slots=True)
class Hello(Request):
    """First message of a connection. Reply: :class:`Welcome`, or ``unauthorized``.

    ``tenant`` is whom an operator's key acts for.
    """

    TYPE: ClassVar[str] = "hello"
    version: int = PROTOCOL_VERSION
    client: str = ""
    key: str | None = None
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Ping(Request):
    """Heartbeat; also says how many :class:`Delta` messages this connection consumed in all.

    Sent every second, and sooner when many were consumed. Reply: :class:`Result` with ``None``; to
    a connection that the engine does not know, :class:`Failure` ``connection_lost``.
    """

    TYPE: ClassVar[str] = "ping"
    consumed: int = 0


@dataclass(frozen=True, slots=True)
class Bye(Request):
    """Last message of a connection: what it has open ends as when it is lost. No reply."""

    TYPE: ClassVar[str] = "bye"


@dataclass(frozen=True, slots=True)
class Open(Request):
    """Create or resume a session. Reply: :class:`Result` with a session-info map.

    ``budget_bytes`` is the most KV that is retained of the session, from its start on.
    ``metadata`` is kept with the root of a new session, and ignored where the session exists.
    """

    TYPE: ClassVar[str] = "open"
    session: str = ""
    system: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    history: str | None = None
    budget_bytes: int | None = None
    metadata: Metadata | None = None


@dataclass(frozen=True, slots=True)
class Turn(Request):
    """One turn of a session; exactly one of text, messages, tokens.

    Replies: :class:`Progress` (when ``stream`` and ``progress``), :class:`Delta` (when
    ``stream``), maybe :class:`Restarted`, then :class:`Done` or
    :class:`Failure`, exactly one.

    ``attempt`` is for keyed turns sent again after a lost connection: the attempt whose deltas the
    client has, 0 for none. The same attempt, running or committed, is sent again from offset 0;
    another one has another number, and a :class:`Restarted` before its first delta when ``attempt``
    is not 0. It is no part of the request's digest.

    ``metadata`` is kept with the turn and given back by :class:`Node`; nothing reads it.

    ``changed_from`` names a session whose conversation this one was before the client changed
    something that only a new session can have, such as its tools. The first turn of a session with
    history ``follow`` is compared with it, and the cache report says where they part.
    """

    TYPE: ClassVar[str] = "turn"
    session: str = ""
    text: str | None = None
    messages: Sequence[ChatMessage] | None = None
    tokens: Sequence[int] | None = None
    sampling: SamplingParams = _DEFAULT_SAMPLING
    stream: bool = False
    progress: bool = False
    when_busy: str = "error"
    idempotency_key: str | None = None
    deadline_s: float | None = None
    priority: int = 0
    attempt: int = 0
    metadata: Metadata | None = None
    changed_from: str | None = None


@dataclass(frozen=True, slots=True)
class Generate(Request):
    """Generate without a session; exactly one of prompt, messages, tokens. Replies as for Turn.

    With ``prompt_logprobs`` all of the prompt is computed, and what is cached of it is not used.
    """

    TYPE: ClassVar[str] = "generate"
    prompt: str | None = None
    messages: Sequence[ChatMessage] | None = None
    tokens: Sequence[int] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    sampling: SamplingParams = _DEFAULT_SAMPLING
    stream: bool = False
    progress: bool = False
    cache: bool = True
    prompt_logprobs: int | None = None
    idempotency_key: str | None = None
    deadline_s: float | None = None
    priority: int = 0
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Pieces(Request):
    """What bytes tokens stand for, control tokens spelled out. Reply: Result {"pieces": [bytes]}.

    The text of a whole sequence is its pieces joined, as UTF-8, but for a space that some
    tokenizers put before it.
    """

    TYPE: ClassVar[str] = "pieces"
    tokens: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Count(Request):
    """How many prompt tokens a :class:`Generate` of the same would have now, or a :class:`Turn`.

    Exactly one of prompt, messages; with ``session`` messages, as a turn of it has them, and no
    tools, which are the session's. Reply: Result ``{"tokens": int}``. Costs what reading such a
    prompt costs, and nothing else; a prompt that does not fit is counted too.
    """

    TYPE: ClassVar[str] = "count"
    session: str | None = None
    prompt: str | None = None
    messages: Sequence[ChatMessage] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Cancel(Request):
    """Cancel an open turn of this connection. Always benign. Reply: Result ``{"found": bool}``.

    With ``keep`` what was generated is committed; with ``chars`` the reply ends behind so many
    characters of its text, unless it has ended before.
    """

    TYPE: ClassVar[str] = "cancel"
    request: int = 0
    keep: bool = False
    chars: int | None = None


@dataclass(frozen=True, slots=True)
class Fork(Request):
    """New session on the last completed node. Reply: Result with the new session's info."""

    TYPE: ClassVar[str] = "fork"
    session: str = ""
    name: str = ""
    node: str | None = None


@dataclass(frozen=True, slots=True)
class Rename(Request):
    """Give a session another name, which its pin keeps. Reply: Result with session info."""

    TYPE: ClassVar[str] = "rename"
    session: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Rewind(Request):
    """Move the head n turns up. Reply: Result with session info."""

    TYPE: ClassVar[str] = "rewind"
    session: str = ""
    turns: int = 1


@dataclass(frozen=True, slots=True)
class Pin(Request):
    """Order the session's blocks last for eviction from ``tier``. Reply: Result, session info."""

    TYPE: ClassVar[str] = "pin"
    session: str = ""
    tier: str = "host"
    ttl_s: float | None = None
    priority: int = 50


@dataclass(frozen=True, slots=True)
class Unpin(Request):
    """Take the pin off. Reply: Result with session info."""

    TYPE: ClassVar[str] = "unpin"
    session: str = ""


@dataclass(frozen=True, slots=True)
class Info(Request):
    """Reply: Result with session info (turns, tokens, bytes per tier, pin, last cache report)."""

    TYPE: ClassVar[str] = "info"
    session: str = ""
    history: bool = False


@dataclass(frozen=True, slots=True)
class Places(Request):
    """Where the session's blocks are. O(history).

    Reply: Result ``{"block_tokens": int, "block_bytes": int, "blocks": int, "counts": {place: int},
    "runs": [[place, count]]}``; the runs in order from the log's start, at most 256.
    """

    TYPE: ClassVar[str] = "places"
    session: str = ""


@dataclass(frozen=True, slots=True)
class Node(Request):
    """One turn of a session, ``node`` or the last. Reply: Result with everything kept of it.

    With ``path`` the Result has all turns from the root to it, in order.
    """

    TYPE: ClassVar[str] = "node"
    session: str = ""
    node: str | None = None
    path: bool = False


@dataclass(frozen=True, slots=True)
class Close(Request):
    """End the handle (``keep``) or delete the session. Reply: Result ``{"closed": bool}``."""

    TYPE: ClassVar[str] = "close"
    session: str = ""
    keep: bool = True


@dataclass(frozen=True, slots=True)
class List(Request):
    """Sessions of the tenant, by name. Reply: Result ``{"sessions": [...], "next": name}``."""

    TYPE: ClassVar[str] = "list"
    prefix: str = ""
    after: str | None = None
    limit: int = 1000


@dataclass(frozen=True, slots=True)
class Export(Request):
    """Turns of a session as they are in the log. O(history).

    Without ``nodes`` the reply is Result ``{"session": map, "path": [number]}``, root first. With
    numbers of that path it is Result ``{"records": [map]}``: the turns asked for in that order,
    as many as a reply should hold and at least one; the rest is asked for again. The maps are those
    of :mod:`sessionkv.types.portable`.
    """

    TYPE: ClassVar[str] = "export"
    session: str = ""
    nodes: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Import(Request):
    """Turns and sessions from elsewhere; they exist, all of them, once one with ``commit`` came.

    Until then they are held for this connection, and forgotten with it.
    Reply: Result ``{"held": turns}``; of the last one ``{"sessions": [name], "turns": int,
    "other_tokenizer": [name]}``, the latter those that will be encoded anew.
    """

    TYPE: ClassVar[str] = "import"
    nodes: Sequence[NodeRecord] = ()
    sessions: Sequence[PortableSession] = ()
    commit: bool = False


@dataclass(frozen=True, slots=True)
class Flush(Request):
    """Write every dirty block of idle sessions to disk. Reply: Result with a map, when done."""

    TYPE: ClassVar[str] = "flush"


@dataclass(frozen=True, slots=True)
class Stats(Request):
    """Reply: Result with all metrics as a nested map; those of the tenant, unless an operator asks.

    With ``brief`` only whether the engine drains and how many turns run and wait. O(turns).
    """

    TYPE: ClassVar[str] = "stats"
    brief: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """Base of what the engine sends."""

    TYPE: ClassVar[str] = ""
    id: int


@dataclass(frozen=True, slots=True)
class Welcome(Reply):
    """Answer to Hello: versions, model, limits and the heartbeat interval.

    ``reply_style`` is the map of a :class:`~sessionkv.types.reply_style.ReplyStyle`.
    """

    TYPE: ClassVar[str] = "welcome"
    version: int = PROTOCOL_VERSION
    engine: str = ""
    pid: int = 0
    model: str = ""
    tenant: str = "local"
    operator: bool = True
    limits: Mapping[str, Any] = field(default_factory=dict)
    reply_style: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result(Reply):
    """Answer to every request that is not a turn."""

    TYPE: ClassVar[str] = "result"
    value: Any = None


@dataclass(frozen=True, slots=True)
class Progress(Reply):
    """How far a turn's prompt is: once when the turn is admitted, before any delta, and on the way.

    The counts by tier are what was found then, as in the cache report: ``device_tokens`` is exact,
    the others are what is to be loaded.
    """

    TYPE: ClassVar[str] = "progress"
    attempt: int = 1
    prompt_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    done_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta(Reply):
    """Provisional output of a turn: ``tokens`` start at ``offset`` of this attempt's output.

    ``text`` is what became certain with them; it may lag behind the tokens (split characters,
    possible stop strings).
    """

    TYPE: ClassVar[str] = "delta"
    attempt: int = 1
    offset: int = 0
    tokens: Sequence[int] = ()
    text: str = ""
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Restarted(Reply):
    """The turn runs anew: forget its deltas, offsets restart at 0."""

    TYPE: ClassVar[str] = "restarted"
    attempt: int = 2


@dataclass(frozen=True, slots=True)
class Done(Reply):
    """Terminal event of a turn that is committed; the maps are of types.reports' fields."""

    TYPE: ClassVar[str] = "done"
    attempt: int = 1
    node: str | None = None
    text: str = ""
    tokens: Sequence[int] = ()
    finish_reason: str = "stop"
    stop: str | int | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    cache: Mapping[str, Any] = field(default_factory=dict)
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class Failure(Reply):
    """Terminal event of a request that failed; id is -1 where the request's id is unknown."""

    TYPE: ClassVar[str] = "error"
    code: str = "error"
    message: str = ""
    retryable: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, request_id: int, error: SessionKVError) -> Failure:
        """The reply that tells of ``error``; :meth:`to_error` is the way back."""
        return cls(request_id, **error.to_wire())

    def to_error(self) -> SessionKVError:
        """The error that the reply tells of."""
        return error_from_wire(
            {
                "code": self.code,
                "message": self.message,
                "retryable": self.retryable,
                "details": self.details,
            }
        )


REQUESTS: Mapping[str, type[Request]] = {
    cls.TYPE: cls
    for cls in (
        Hello,
        Ping,
        Bye,
        Open,
        Turn,
        Generate,
        Pieces,
        Count,
        Cancel,
        Fork,
        Rename,
        Rewind,
        Pin,
        Unpin,
        Info,
        Places,
        Node,
        Close,
        List,
        Export,
        Import,
        Flush,
        Stats,
    )
}
REPLIES: Mapping[str, type[Reply]] = {
    cls.TYPE: cls for cls in (Welcome, Result, Progress, Delta, Restarted, Done, Failure)
}
PROVISIONAL = (Progress, Delta, Restarted)
"""Replies that come before the terminal one."""
