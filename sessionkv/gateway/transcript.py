"""A client's conversation reduced to what stays the same however the client writes it down.

Clients that keep no session send everything each time, and not quite as they got it: reasoning is
dropped, whitespace trimmed, the JSON of tool calls written anew, ids of calls renamed. A digest of
a conversation up to some message leaves all that out. Two conversations of one digest may therefore
differ in it; whoever acts on a digest must still compare the messages. Knows nothing of the engine.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Message = Mapping[str, Any]
_THOUGHTS = re.compile(r"\A\s*(?:<think>)?.*?</think>", re.DOTALL)
_SYSTEM = ("system", "developer")


@dataclass(frozen=True)
class Transcript:
    """A conversation as a client sent it. It is read once, O(its length), for all its digests.

    Attributes:
        messages: In the form of Chat Completions; checked by the engine alone.
        tools: As the template is to be given them; None and none are the same.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None

    @property
    def system(self) -> str | None:
        """What the leading system messages say, as the engine joins them; None without any."""
        texts = []
        for message in self.messages:
            if message.get("role") not in _SYSTEM:
                break
            texts.append(text_of(message))
        return "\n\n".join(texts) if texts else None

    def digests(self) -> list[str]:
        """Of the conversation up to each answer in it, first to last."""
        roles = (message.get("role") for message in self.messages)
        return [
            digest
            for role, digest in zip(roles, self._read.digests, strict=True)
            if role == "assistant"
        ]

    def all_digests(self) -> list[str]:
        """Of the conversation up to each message."""
        return self._read.digests

    @cached_property
    def _read(self) -> _Reading:
        reading = _Reading(self._tools_state(), {}, [])
        for message in self.messages:
            reading.digests.append(reading.add(message))
        return reading

    @property
    def tools_digest(self) -> str:
        """Of the tools alone."""
        digest: str = self._tools_state().hexdigest()
        return digest

    @property
    def opening(self) -> str:
        """What the user said first."""
        users = (message for message in self.messages if message.get("role") == "user")
        return text_of(next(users, {})).strip()

    def answered(self, reply: Message) -> str:
        """The digest of the conversation with an answer behind it. O(answer)."""
        read = self._read
        return _Reading(read.state.copy(), dict(read.calls), []).add(reply)

    def _tools_state(self) -> Any:
        return hashlib.sha256(_framed(list(self.tools or ())))


@dataclass(frozen=True, slots=True)
class _Reading:
    """A hash of what was read, the ids of its calls by number, and the digests on the way."""

    state: Any
    calls: dict[str, int]
    digests: list[str]

    def add(self, message: Message) -> str:
        self.state.update(_framed(_essence(message, self.calls)))
        digest: str = self.state.copy().hexdigest()
        return digest


def text_of(message: Message) -> str:
    """A message's text; parts are joined with nothing between, as the engine does."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else ()
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping))


def _framed(value: Any) -> bytes:
    """JSON in one spelling, with its length before it, so that no two sequences run together."""
    text = json.dumps(value, sort_keys=True, default=str).encode()
    return len(text).to_bytes(8, "little") + text


def _essence(message: Message, calls: dict[str, int]) -> list[Any]:
    """What of a message counts; ``calls`` numbers the ids of tool calls as they come."""
    role = message.get("role")
    text = text_of(message)
    if role == "assistant":
        text = _THOUGHTS.sub("", text, count=1)
    asked = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        calls.setdefault(str(call.get("id")), len(calls))
        asked.append([function.get("name"), _canonical(function.get("arguments"))])
    answers = message.get("tool_call_id")
    number = None if answers is None else calls.get(str(answers), str(answers))
    role = "system" if role in _SYSTEM else role
    return [role, text.strip(), message.get("name"), number, asked]


def _canonical(arguments: Any) -> Any:
    """Arguments as the value they stand for; text that is no JSON stands for itself."""
    if not isinstance(arguments, str):
        return [arguments or {}]
    try:
        return [json.loads(arguments)] if arguments.strip() else [{}]
    except (ValueError, RecursionError):
        return arguments
