"""Takes out of a conversation what agents change in it on their own: dates, and blocks that move.

What is left is the same in every request of a conversation, so it is what a conversation is found
by; what was taken out goes back in by :mod:`sessionkv.gateway.rewriting_places`. Both are lossless:
put back where it was found, everything is as it was sent, to the character.

Only forms that agents' own programs write are known, in the places where they write them:

========================  ==========================================  =======================
what                      where                                       who
========================  ==========================================  =======================
``Today's date: ...``     a line of the last ``<env>`` block of the   Claude Code, OpenCode
                          system prompt
``Today's date is ...``   a line by itself in a ``<system-reminder>`` Claude Code
                          block at the start of the first message
``<system-reminder>``     whole blocks at the start or end of a       Claude Code, OpenCode
                          user's message or a tool's result
========================  ==========================================  =======================

What a user says in words of their own is never touched.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sessionkv.gateway.transcript import Message, Transcript, text_of

Side = Literal["head", "tail", "own"]
"""Before a message's text, behind it, or a message of its own behind it."""

_OPENING, _CLOSING = "<system-reminder>", "</system-reminder>"
_ENV_DATE = re.compile(r"^[ \t]*(Today's date: [^\n]{6,40})\n", re.MULTILINE)
_SAID_DATE = re.compile(r"^(Today's date is \d{4}-\d\d-\d\d\.?)\n", re.MULTILINE)
_SPACE = " \t\n"
_MOST_SPACE = 8
_MOST_BLOCKS = 8
"""At either end of a message; more are left where they are."""
MAX_PIECES = 400
"""In one conversation, so that their places fit into a turn's metadata. In the message with which
there would be more, and in all behind it, they stay where they are: before it nothing changes."""
_KEY_CHARS = 16
_MOVERS = ("user", "tool")


@dataclass(frozen=True, slots=True)
class Piece:
    """Something that was taken out.

    Attributes:
        kind: ``"date"`` or ``"reminder"``.
        text: It, without white space around.
        at: Index of its message among those that are left.
        side: Where in it a reminder stood.
        lead: White space before it.
        trail: White space behind it.
        field: The request's field that it was found in.
    """

    kind: Literal["date", "reminder"]
    text: str
    at: int
    side: Side
    lead: str
    trail: str
    field: str

    @property
    def key(self) -> str:
        """What it is known by from request to request."""
        return self.text if self.kind == "date" else _digest(self.text)


@dataclass(frozen=True, slots=True)
class Steady:
    """A conversation without what moves.

    Attributes:
        transcript: What is left.
        pieces: What was taken out, in the order in which it stood.
    """

    transcript: Transcript
    pieces: Sequence[Piece]


def steady(transcript: Transcript) -> Steady:
    """Take a conversation apart. O(its length)."""
    messages: list[Message] = []
    fields: list[str] = []
    pieces: list[Piece] = []
    is_first, is_full = True, False
    for index, message in enumerate(transcript.messages):
        field = transcript.field(index)
        at = len(messages)
        left, found = message, list[Piece]()
        if is_full:
            pass
        elif index < transcript.num_system:
            left, found = _system_date(message, field)
        elif message.get("role") in _MOVERS:
            left, found = _reminders(message, field, is_first=is_first)
            if len(pieces) + len(found) > MAX_PIECES:
                is_full, left, found = True, message, []
            if found and not text_of(left) and not is_first:
                follows_own = bool(pieces) and (pieces[-1].at, pieces[-1].side) == (at - 1, "own")
                if not follows_own and _is_own(message, messages[transcript.num_system :]):
                    pieces += [replace(piece, at=at - 1, side="own") for piece in found]
                    continue
                left, found = message, []
            is_first = False
        pieces += [replace(piece, at=at) for piece in found]
        messages.append(left)
        fields.append(field)
    if not pieces:
        return Steady(transcript, ())
    return Steady(Transcript(messages, transcript.tools, fields), pieces)


def _is_own(message: Message, before: Sequence[Message]) -> bool:
    """Whether a message of reminders can go: without it the assistant has not spoken last."""
    return message.get("role") == "user" and before[-1].get("role") != "assistant"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_KEY_CHARS]


def with_text(message: Message, text: str) -> Message:
    """A message that says something else."""
    value: dict[str, Any] = {**message, "content": text}
    return value


def _date(text: str, field: str) -> Piece:
    return Piece("date", text, 0, "tail", "\n\n", "", field)


def _system_date(message: Message, field: str) -> tuple[Message, list[Piece]]:
    text = text_of(message)
    start = text.rfind("<env>\n")
    end = text.find("</env>", start)
    if start < 0 or end < 0 or text[text.rfind("\n", 0, start) + 1 : start].strip():
        return message, []
    found = _ENV_DATE.search(text, start, end)
    if found is None:
        return message, []
    left = text[: found.start()] + text[found.end() :]
    return with_text(message, left), [_date(found[1], field)]


def _reminders(message: Message, field: str, *, is_first: bool) -> tuple[Message, list[Piece]]:
    """The message without the blocks at its ends."""
    text = text_of(message)
    if _CLOSING not in text:
        return message, []
    heads: list[Piece] = []
    tails: list[Piece] = []
    start, end = 0, len(text)
    while len(heads) < _MOST_BLOCKS and (span := _first_block(text, start, end)) is not None:
        heads.append(_reminder(text, start, span, span[2], side="head", field=field))
        start = span[2]
    while len(tails) < _MOST_BLOCKS and (span := _last_block(text, start, end)) is not None:
        tails.insert(0, _reminder(text, span[2], span, end, side="tail", field=field))
        end = span[2]
    found = [*heads, *tails]
    if is_first:
        found = [part for piece in found for part in _dated(piece)]
    return (with_text(message, text[start:end]), found) if found else (message, [])


def _reminder(
    text: str, start: int, span: tuple[int, int, int], end: int, *, side: Side, field: str
) -> Piece:
    """``text[start:end]`` is white space, the block at the span, and white space."""
    first, last, _ = span
    lead, trail = text[start:first], text[last:end]
    return Piece("reminder", text[first:last], 0, side, lead, trail, field)


def _first_block(text: str, start: int, end: int) -> tuple[int, int, int] | None:
    """Where the block is that a text begins with, and where the white space behind it ends."""
    first = _skip(text, start, end)
    if not text.startswith(_OPENING, first, end):
        return None
    last = text.find(_CLOSING, first, end)
    if last < 0 or text.find(_OPENING, first + 1, last) >= 0:
        return None
    last += len(_CLOSING)
    return first, last, _skip(text, last, end)


def _last_block(text: str, start: int, end: int) -> tuple[int, int, int] | None:
    """Where the block is that ends a text, and where the white space before it begins."""
    last = _skip_back(text, start, end)
    if not text.endswith(_CLOSING, start, last):
        return None
    first = text.rfind(_OPENING, start, last)
    inner = last - len(_CLOSING)
    if first < 0 or text.find(_CLOSING, first, inner) >= 0:
        return None
    return first, last, _skip_back(text, start, first)


def _skip(text: str, start: int, end: int) -> int:
    """Past white space, up to a bound."""
    most = min(end, start + _MOST_SPACE)
    while start < most and text[start] in _SPACE:
        start += 1
    return start


def _skip_back(text: str, start: int, end: int) -> int:
    least = max(start, end - _MOST_SPACE)
    while end > least and text[end - 1] in _SPACE:
        end -= 1
    return end


def _dated(piece: Piece) -> list[Piece]:
    """A reminder at the start of a conversation, and apart from it the date that it tells."""
    found = _SAID_DATE.search(piece.text) if piece.side == "head" else None
    if found is None:
        return [piece]
    left = piece.text[: found.start()] + piece.text[found.end() :]
    return [replace(piece, text=left), _date(found[1], piece.field)]
