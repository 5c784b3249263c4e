"""What the clients return: results of turns, events of streams, what is known of a session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sessionkv.ipc.messages import Done, Progress, Welcome
from sessionkv.ipc.reports import cache_from_map, usage_from_map
from sessionkv.types import CacheReport, FinishReason, TokenLogprob, Usage
from sessionkv.types.reply_style import ReplyStyle

Logprobs = tuple[tuple[TokenLogprob, ...], ...]
"""For each token: the token itself first, then the likeliest ones."""


@dataclass(frozen=True, slots=True)
class TurnResult:
    """A finished turn.

    Attributes:
        text: The reply; without the stop string.
        tokens: Ids of the reply as they are in the session's log.
        finish_reason: Why it ended.
        usage: Token counts.
        cache: Where the prompt's KV came from.
        node: Id of the turn, None without a session.
        logprobs: As asked for, else None.
        prompt_logprobs: Of each token of the prompt but the first, as asked for, else None.
        stop: The stop string or token id that ended the turn, else None.
        replayed: The answer of an earlier run under the same idempotency key.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    cache: CacheReport
    node: str | None = None
    logprobs: Logprobs | None = None
    stop: str | int | None = None
    replayed: bool = False
    prompt_logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How far a turn's prompt is.

    Attributes:
        prompt_tokens: Of the whole prompt.
        device_tokens: Found on the device when the turn was admitted; as in the cache report.
        host_tokens: Found in host memory then, and to be loaded.
        disk_tokens: Found on disk then, and to be loaded. What cannot be loaded, or is computed
            sooner, counts as computed in the cache report.
        done_tokens: Loaded or computed so far, those on the device included.
    """

    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    done_tokens: int

    @property
    def cached_tokens(self) -> int:
        """Tokens that need not be computed."""
        return self.device_tokens + self.host_tokens + self.disk_tokens


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A piece of a turn as it is generated.

    The texts of all events since the last ``restarted`` one make up the result's text, and so do
    the tokens.

    Attributes:
        text: What became certain; may lag behind the tokens.
        tokens: New ids.
        offset: Position of the first of them in the reply.
        logprobs: For these tokens, as asked for.
        restarted: Forget the events before: the engine had to run the turn anew.
        progress: How far the prompt is, where it was asked for; such an event has nothing else.
        result: The whole, on the last event.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    offset: int = 0
    logprobs: Logprobs | None = None
    restarted: bool = False
    progress: PromptProgress | None = None
    result: TurnResult | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine serves, and to whom.

    Attributes:
        engine: Differs between any two runs of engines.
        pid: Of the process that computes.
        model: Its name.
        tenant: Whose sessions this client sees.
        max_model_len: Most tokens of a prompt and its reply.
        vocab_size: Ids from here on do not exist.
        reply_style: How the model writes tool calls and reasoning.
        limits: All limits, as the engine tells them.
    """

    engine: str
    pid: int
    model: str
    tenant: str
    max_model_len: int
    vocab_size: int
    reply_style: ReplyStyle
    limits: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PinInfo:
    """A session's pin; ``expires_s`` is wall-clock seconds, None for no end."""

    tier: str
    expires_s: float | None
    priority: int


@dataclass(frozen=True, slots=True)
class TierBytes:
    """Bytes of a session's KV in one tier: its own, and those it shares with other sessions."""

    exclusive: int
    shared: int


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What the engine knows of a session.

    Attributes:
        name: Its name.
        node: Id of the last turn (or of the root).
        turns: Completed turns.
        tokens: Tokens of the log.
        kind: ``"chat"``, ``"raw"``, or ``"root"`` before the first turn.
        history: ``"keep"`` or ``"follow"``: how incoming histories are read.
        created_s: Wall-clock seconds.
        updated_s: Wall-clock seconds.
        pin: None when not pinned.
        bytes: KV per tier.
        budget_bytes: Most KV that is retained of it, None for no limit.
        running: A turn runs now.
        queued: Turns that wait for it.
        last_cache: Cache report of the last turn, where known.
        messages: The conversation, when history was asked for.
        message_nodes: The turn that each of them belongs to.
    """

    name: str
    node: str
    turns: int
    tokens: int
    kind: str
    history: str
    created_s: float
    updated_s: float
    pin: PinInfo | None = None
    bytes: Mapping[str, TierBytes] = field(default_factory=dict)
    running: bool = False
    queued: int = 0
    last_cache: CacheReport | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    budget_bytes: int | None = None
    message_nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionPage:
    """Some sessions, by name; ``next`` is where the next page begins, None at the end."""

    sessions: tuple[SessionInfo, ...]
    next: str | None


@dataclass(frozen=True, slots=True)
class Places:
    """Where the blocks of a session are, each by the fastest place that has it.

    A place is a tier, or ``"nowhere"`` for what would be computed again.

    Attributes:
        block_tokens: Tokens a block.
        block_bytes: Bytes a block.
        blocks: How many there are; the last may be unfilled.
        counts: Blocks in each place, exact.
        runs: Place and number of neighbours, in order from the log's start; at most 256. Where
            there are more, so many blocks at a time count as where the most of them are.
    """

    block_tokens: int
    block_bytes: int
    blocks: int
    counts: Mapping[str, int]
    runs: tuple[tuple[str, int], ...]


def prompt_progress(progress: Progress) -> PromptProgress:
    """From the wire."""
    return PromptProgress(
        progress.prompt_tokens,
        progress.device_tokens,
        progress.host_tokens,
        progress.disk_tokens,
        progress.done_tokens,
    )


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What is kept of one turn.

    Attributes:
        node: Its id.
        parent: Id of the turn before; None of a root.
        kind: ``"chat"``, ``"raw"`` or ``"root"``.
        turns: Turns from the session's start to this one.
        created_s: Wall-clock seconds.
        system: The system prompt that the conversation begins with.
        tools: Its tools.
        messages: What came in with the turn.
        reply: The assistant's message; None of a root.
        finish_reason: Why it ended; None of a root.
        usage: ``prompt_tokens``, ``completion_tokens`` and ``cached_tokens`` as they were
            reported; empty where that was not kept.
        metadata: What the client had kept with it.
        cache: Cache report of the turn, where it is still known.
    """

    node: str
    parent: str | None
    kind: str
    turns: int
    created_s: float
    system: str | None
    tools: tuple[Mapping[str, Any], ...]
    messages: tuple[Mapping[str, Any], ...]
    reply: Mapping[str, Any] | None
    finish_reason: FinishReason | None
    usage: Mapping[str, int]
    metadata: Mapping[str, Any]
    cache: CacheReport | None = None


def node_info(value: Mapping[str, Any]) -> NodeInfo:
    """From the wire; unknown fields are ignored, absent ones are empty."""
    reason = value.get("finish_reason")
    return NodeInfo(
        node=value["node"],
        parent=value.get("parent"),
        kind=value.get("kind", "chat"),
        turns=value.get("turns", 0),
        created_s=value.get("created_s", 0.0),
        system=value.get("system"),
        tools=tuple(value.get("tools") or ()),
        messages=tuple(value.get("messages") or ()),
        reply=value.get("reply"),
        finish_reason=FinishReason(reason) if reason else None,
        usage=value.get("usage") or {},
        metadata=value.get("metadata") or {},
        cache=cache_from_map(value["cache"]) if value.get("cache") else None,
    )


def path_of(value: Mapping[str, Any]) -> list[NodeInfo]:
    """All turns of a path, from the wire."""
    begun = {"system": value.get("system"), "tools": value.get("tools")}
    return [node_info({**begun, **turn}) for turn in value["path"]]


def turn_result(done: Done) -> TurnResult:
    """From the wire."""
    return TurnResult(
        text=done.text,
        tokens=tuple(done.tokens),
        finish_reason=FinishReason(done.finish_reason),
        usage=usage_from_map(done.usage),
        cache=cache_from_map(done.cache),
        node=done.node,
        logprobs=logprobs_from_wire(done.logprobs),
        stop=done.stop,
        replayed=done.replayed,
        prompt_logprobs=logprobs_from_wire(done.prompt_logprobs),
    )


def served(welcome: Welcome) -> Served:
    """From the wire."""
    return Served(
        engine=welcome.engine,
        pid=welcome.pid,
        model=welcome.model,
        tenant=welcome.tenant,
        max_model_len=welcome.limits.get("max_model_len", 0),
        vocab_size=welcome.limits.get("vocab_size", 0),
        reply_style=ReplyStyle.from_map(welcome.reply_style),
        limits=welcome.limits,
    )


def logprobs_from_wire(value: Any) -> Logprobs | None:
    """From lists of ``[token_id, logprob]``."""
    if value is None:
        return None
    return tuple(tuple(TokenLogprob(*pair) for pair in token) for token in value)


def session_info(value: Mapping[str, Any]) -> SessionInfo:
    """From the wire; unknown fields are ignored, absent ones are empty."""
    pin, last = value.get("pin"), value.get("last_cache")
    return SessionInfo(
        name=value["name"],
        node=str(value.get("node", "")),
        turns=value.get("turns", 0),
        tokens=value.get("tokens", 0),
        kind=value.get("kind", "root"),
        history=value.get("history", "keep"),
        created_s=value.get("created_s", 0.0),
        updated_s=value.get("updated_s", 0.0),
        pin=PinInfo(pin["tier"], pin.get("expires_s"), pin["priority"]) if pin else None,
        bytes={
            tier: TierBytes(counts.get("exclusive", 0), counts.get("shared", 0))
            for tier, counts in value.get("bytes", {}).items()
        },
        running=value.get("running", False),
        queued=value.get("queued", 0),
        last_cache=cache_from_map(last) if last else None,
        messages=tuple(value.get("messages") or ()),
        budget_bytes=value.get("budget_bytes"),
        message_nodes=tuple(value.get("message_nodes") or ()),
    )


def page_of_sessions(value: Mapping[str, Any]) -> SessionPage:
    """From the wire."""
    return SessionPage(tuple(map(session_info, value["sessions"])), value.get("next"))


def session_places(value: Mapping[str, Any]) -> Places:
    """From the wire."""
    return Places(
        block_tokens=value["block_tokens"],
        block_bytes=value["block_bytes"],
        blocks=value["blocks"],
        counts=dict(value["counts"]),
        runs=tuple((place, count) for place, count in value["runs"]),
    )
