"""Compares a history that a client sent again with the one that was stored, message by message.

Equal means: same role; same text but for whitespace at either end; same tool calls, arguments
compared as parsed JSON, also where one side has them in its text as the model wrote them; reasoning
the same but for whitespace at either end, or absent on one side. Values in tags have no type: one
counts as the other side's where it says the same. Reasoning may be a field of its own on one side
and a ``<think>`` block at the start of the text on the other. Unicode is not normalised. This only
says where the histories part; which ids may be reused is decided on rendered text, in
:mod:`sessionkv.text.follow`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sessionkv.text.messages import Message, ToolCall
from sessionkv.text.spoken import calls_in
from sessionkv.text.tagged import read_tagged

_THINK = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message of a stored conversation.

    Attributes:
        message: As it was sent, or the reply as the client saw it.
        turn: Number of its turn (the root is 0).
        end_token: Where it ends in the log: for a reply its own end, for what came in the end of
            that turn's incoming ids.
        reply_ids: The ids of a reply as they stand in the log; None for what came in.
    """

    message: Message
    turn: int
    end_token: int
    reply_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class MessageDifference:
    """The first message that differs: what was stored and what was sent, cut to a short text."""

    index: int
    expected: str
    found: str


@dataclass(frozen=True, slots=True)
class HistoryMatch:
    """How far a resent history agrees with the stored one.

    Attributes:
        num_matching: Leading messages that are equal.
        first_difference: None where one history begins with the whole of the other.
    """

    num_matching: int
    first_difference: MessageDifference | None


def match_history(stored: Sequence[StoredMessage], incoming: Sequence[Message]) -> HistoryMatch:
    """Compare; O(length of both)."""
    for index, (old, new) in enumerate(zip(stored, incoming, strict=False)):
        if not same_message(old.message, new):
            expected, found = _parting(_words(old.message), _words(new))
            return HistoryMatch(index, MessageDifference(index, expected, found))
    return HistoryMatch(min(len(stored), len(incoming)), None)


def same_message(old: Message, new: Message) -> bool:
    """Whether two messages say the same (see the module)."""
    old, new = _with_calls(old, new), _with_calls(new, old)
    return (
        old.role == new.role
        and old.name == new.name
        and old.tool_call_id == new.tool_call_id
        and _same_text(old, new)
        and len(old.tool_calls) == len(new.tool_calls)
        and all(map(_same_call, old.tool_calls, new.tool_calls))
    )


def _with_calls(message: Message, other: Message) -> Message:
    """A reply with its calls in the form and under the ids of the other's, which has them parsed.

    Ids are made for the client when a reply is taken apart; its text has none.
    """
    if message.role != "assistant" or message.tool_calls or not other.tool_calls:
        return message
    text = message.content or ""
    thoughts = _THINK.match(text)
    head = thoughts[0] if thoughts else ""
    before, calls = read_tagged(text[len(head) :], other.tool_calls)
    if not calls:
        before, calls = calls_in(text[len(head) :])
    if len(calls) != len(other.tool_calls):
        return message
    named = [replace(call, id=its.id) for call, its in zip(calls, other.tool_calls, strict=True)]
    return replace(message, content=head + before, tool_calls=tuple(named))


def thoughts_of(message: Message) -> str:
    """The thoughts that a reply's text begins with, marks included; empty where it has none."""
    match = _THINK.match(message.content or "")
    return match[0] if match else ""


def _same_text(old: Message, new: Message) -> bool:
    old_thoughts, old_text = _thoughts_and_text(old)
    new_thoughts, new_text = _thoughts_and_text(new)
    same_thoughts = None in (old_thoughts, new_thoughts) or old_thoughts == new_thoughts
    return same_thoughts and old_text == new_text


def _thoughts_and_text(message: Message) -> tuple[str | None, str]:
    """Both without whitespace at their ends; the thoughts are None where the message has none.

    Beside thoughts in their own field a block in the text is text: a template may show both.
    """
    text = (message.content or "").strip()
    thoughts = (message.reasoning or "").strip() or None
    block = _THINK.match(text) if message.role == "assistant" and thoughts is None else None
    if block is None:
        return thoughts, text
    return block[1].strip(), text[block.end() :].strip()


def _same_call(old: ToolCall, new: ToolCall) -> bool:
    if old.name != new.name or old.id != new.id:
        return False
    return old.arguments == new.arguments or (
        _canonical(old) == _canonical(new) and old.parsed() is not None
    )


def _canonical(call: ToolCall) -> str | None:
    """Arguments in one spelling: 1 and 1.0 and true stay different, the order of keys does not."""
    parsed = call.parsed()
    return None if parsed is None else json.dumps(parsed, sort_keys=True)


def _words(message: Message) -> str:
    if not message.tool_calls:
        return f"{message.role}: {message.content or ''}"
    return f"{message.role}: {json.dumps(message.to_map(), ensure_ascii=False)}"


def _parting(old: str, new: str) -> tuple[str, str]:
    """Both from shortly before the first character that differs."""
    limit = min(len(old), len(new))
    at = next((i for i in range(limit) if old[i] != new[i]), limit)
    start = max(0, at - _SHOWN_CHARS // 4)
    return old[start : start + _SHOWN_CHARS], new[start : start + _SHOWN_CHARS]
