"""The object ``response``: from a request and its outcome, or from what is kept of both.

What a response repeats of its request is kept with its turn as metadata; system prompt and tools
are the root's, and only how the system prompt came about is noted beside them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sessionkv.client.results import NodeInfo
from sessionkv.gateway.openai.response_items import from_tools
from sessionkv.gateway.openai.response_schema import ResponseRequest
from sessionkv.types import FinishReason

JOINT = "\n\n"
"""Between the parts of a system prompt."""
_KEPT = "response"
_PARTS = "system"
_OWN = "own"
_SPACES = "namespaces"
_RETENTION = {"24h": "24h", "in_memory": "in_memory", "in-memory": "in_memory"}


@dataclass(frozen=True, slots=True)
class SystemPart:
    """A part of the system prompt that a response began with.

    Attributes:
        role: ``instructions``, or the role of the input item that it was.
        text: What it says.
    """

    role: str
    text: str


def join_system(parts: Sequence[SystemPart]) -> str | None:
    """The system prompt of these parts."""
    return JOINT.join(part.text for part in parts) if parts else None


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """What is kept of a response beside its turn's own messages.

    Attributes:
        echo: What the object repeats of its request, as plain values.
        system: The parts of the system prompt.
        num_history: Of the turn's messages, those that were said before this response.
        num_system: Of the system's parts, those that came in with this response's input.
        spaces: Where among the tools those of namespaces are, as from
            :func:`~sessionkv.gateway.openai.response_items.spaces_of`.
    """

    echo: Mapping[str, Any]
    system: tuple[SystemPart, ...] = ()
    num_history: int = 0
    num_system: int = 0
    spaces: tuple[tuple[str, int, int], ...] = ()

    def to_metadata(self) -> dict[str, Any]:
        """For the turn; the system prompt itself is the root's."""
        parts = [[part.role, len(part.text)] for part in self.system]
        own = [self.num_history, self.num_system]
        spaces = {_SPACES: [list(space) for space in self.spaces]} if self.spaces else {}
        return {_KEPT: dict(self.echo), _PARTS: parts, _OWN: own, **spaces}

    @classmethod
    def of(cls, node: NodeInfo) -> KeptResponse | None:
        """The way back; None where the turn is no response."""
        echo = node.metadata.get(_KEPT)
        if not isinstance(echo, Mapping) or "id" not in echo:
            return None
        parts, start, system = [], 0, node.system or ""
        for role, length in node.metadata.get(_PARTS) or ():
            parts.append(SystemPart(role, system[start : start + length]))
            start += length + len(JOINT)
        num_history, num_system = node.metadata.get(_OWN) or (0, 0)
        spaces = tuple(
            (name, first, count) for name, first, count in node.metadata.get(_SPACES, ())
        )
        return cls(echo, tuple(parts), num_history, num_system, spaces)

    @property
    def instructions(self) -> str | None:
        """The request's own."""
        return next((part.text for part in self.system if part.role == "instructions"), None)

    @property
    def own_system(self) -> tuple[SystemPart, ...]:
        """Parts that came in with this response's input."""
        return self.system[len(self.system) - self.num_system :]

    @property
    def calls_tools(self) -> bool:
        """Whether the reply's calls were calls."""
        return self.echo.get("tool_choice") != "none"

    @property
    def calls_once(self) -> bool:
        """Whether the reply was over with its first call."""
        return self.echo.get("parallel_tool_calls") is False


def echo_of(body: ResponseRequest, response_id: str, *, model: str, tier: str) -> dict[str, Any]:
    """What a response repeats of its request."""
    text = {"format": {"type": "text"}, "verbosity": "medium"}
    if body.text is not None:
        text |= body.text.model_dump(exclude_none=True)
    reasoning = {"effort": None, "summary": None}
    if body.reasoning is not None:
        reasoning |= body.reasoning.model_dump()
    conversation = None if body.conversation_id is None else {"id": body.conversation_id}
    return {
        "id": response_id,
        "background": bool(body.background),
        "created_at": int(time.time()),
        "model": model,
        "conversation": conversation,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_options": _cache_options(body),
        "prompt_cache_retention": _RETENTION.get(body.prompt_cache_retention or ""),
        "reasoning": reasoning,
        "safety_identifier": body.safety_identifier,
        "service_tier": tier,
        "store": body.is_stored,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": text,
        "tool_choice": body.tool_choice or "auto",
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _cache_options(body: ResponseRequest) -> dict[str, Any] | None:
    given = body.prompt_cache_options
    if given is None:
        return None
    said = {"comparison_response_id": given.comparison_response_id}
    return {"mode": "implicit", "ttl": given.ttl or "30m", **said}


def body_of(
    kept: KeptResponse,
    tools: Sequence[Mapping[str, Any]],
    *,
    status: str,
    output: Sequence[Mapping[str, Any]] = (),
    usage: Mapping[str, Any] | None = None,
    error: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The whole object.

    Args:
        kept: Of the response.
        tools: As the template has them.
        status: ``queued``, ``in_progress``, ``completed``, ``incomplete``, ``failed`` or
            ``cancelled``.
        output: Its items.
        usage: From :func:`usage_of`.
        error: Why it failed.
    """
    reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        "object": "response",
        "status": status,
        "error": error,
        "incomplete_details": reason,
        "instructions": kept.instructions,
        "output": list(output),
        "tools": from_tools(tools),
        "usage": usage,
        **kept.echo,
    }


def status_of(reason: FinishReason | None) -> str:
    """A response's status by why its turn ended."""
    return "incomplete" if reason is FinishReason.LENGTH else "completed"


def usage_of(usage: Mapping[str, int], output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Usage as this API tells it.

    Args:
        usage: ``prompt_tokens``, ``completion_tokens`` and ``cached_tokens``.
        output: The items. How many of the tokens are reasoning is told by its share of the text.
    """
    prompt, completion = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    cached = usage.get("cached_tokens", 0)
    thought = sum(_num_chars(item) for item in output if item["type"] == "reasoning")
    whole = sum(map(_num_chars, output))
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": prompt - cached},
        "output_tokens": completion,
        "output_tokens_details": {
            "reasoning_tokens": round(completion * thought / whole) if whole else 0
        },
        "total_tokens": prompt + completion,
    }


def _num_chars(item: Mapping[str, Any]) -> int:
    parts = item.get("content") or ()
    return len(item.get("arguments") or "") + sum(len(part["text"]) for part in parts)
