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
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

from sessionkv.types import MissReport

Message = Mapping[str, Any]
_THOUGHTS = re.compile(r"\A\s*(?:<think>)?.*?</think>", re.DOTALL)
_SYSTEM = ("system", "developer")


@dataclass(frozen=True)
class Transcript:
    """A conversation as a client sent it. It is read once, O(its length), for all its digests.

    Attributes:
        messages: In the form of Chat Completions; checked by the engine alone.
        tools: As the template is to be given them; None and none are the same.
        fields: For each message the field of the request that it comes from, where that is not one
            message each.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    fields: Sequence[str] | None = None

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
        return [
            digest
            for said, digest in zip(self.said, self._read.digests, strict=True)
            if said.is_answer
        ]

    def all_digests(self) -> list[str]:
        """Of the conversation up to each message."""
        return self._read.digests

    @property
    def said(self) -> list[Said]:
        """Each message by itself, without those of the system at the start."""
        return self._read.said

    @cached_property
    def _read(self) -> _Reading:
        reading = _Reading(hashlib.sha256(), {}, [], [])
        for message in self.messages[self.num_system :]:
            reading.add(message)
        return reading

    def located(self, miss: MissReport) -> MissReport:
        """What the engine says of its messages, as said of the request.

        Messages of the system at the start are one to the engine.
        """
        if miss.part == "system":
            return replace(miss, part=self.field(0) if self.num_system else miss.part)
        if miss.part != "message" or miss.message is None:
            return miss
        index = miss.message + max(0, self.num_system - 1) if miss.message else 0
        index = min(index, len(self.messages) - 1)  # a shorter request ends where it differs
        return replace(miss, message=index, part=self.field(index))

    def field(self, index: int) -> str:
        """Of the request, that a message comes from."""
        return f"messages[{index}]" if self.fields is None else self.fields[index]

    @cached_property
    def num_system(self) -> int:
        """Messages of the system at the start."""
        roles = (message.get("role") for message in self.messages)
        return sum(1 for _ in takewhile(lambda role: role in _SYSTEM, roles))

    @cached_property
    def root(self) -> str:
        """Digest of system prompt and tools."""
        system = self.system
        said = [None if system is None else system.strip(), list(self.tools or ())]
        return hashlib.sha256(_framed(said)).hexdigest()

    def with_answer(self, reply: Message) -> tuple[Said, str]:
        """An answer by itself, and the digest of the conversation with it behind. O(answer)."""
        read = self._read
        reading = _Reading(read.state.copy(), dict(read.calls), [], [])
        reading.add(reply)
        return reading.said[0], reading.digests[0]

    @property
    def opening(self) -> str:
        """What the user said first."""
        users = (message for message in self.messages if message.get("role") == "user")
        return text_of(next(users, {})).strip()


@dataclass(frozen=True, slots=True)
class Said:
    """One message by itself.

    Attributes:
        digest: Of what counts of it.
        size: Bytes of that.
        is_answer: It is the assistant's.
    """

    digest: bytes
    size: int
    is_answer: bool


@dataclass(frozen=True, slots=True)
class _Reading:
    """A hash of what was read, the ids of its calls by number, and what was found on the way."""

    state: Any
    calls: dict[str, int]
    digests: list[str]
    said: list[Said]

    def add(self, message: Message) -> None:
        text = _framed(_essence(message, self.calls))
        own = hashlib.sha256(text).digest()
        self.state.update(own)
        self.digests.append(self.state.hexdigest())
        self.said.append(Said(own, len(text), message.get("role") == "assistant"))


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
