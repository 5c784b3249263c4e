"""Which log-probabilities belong to the text of a reply's messages.

A reply's tokens spell more than that: marks, reasoning, calls, an end token that is not shown. What
the parser gives out as text is found again where it stands in the reply: pieces come in order, and
behind one there is only what the parser may still hold back, the beginning of a mark or space. So
it is fed character by character.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sessionkv.client.results import Logprobs
from sessionkv.gateway.openai.logprobs import chat_logprobs
from sessionkv.gateway.replies import ReplyEvent, ReplyParser, ReplyStyle, Text
from sessionkv.gateway.replies.calls import FORMS

_REPLACED = "\ufffd".encode()
"""In the text for bytes that are no character."""


@dataclass(frozen=True, slots=True)
class ToldText:
    """Text for the reader, with the log-probabilities of the tokens that spell it."""

    text: str
    logprobs: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Token:
    piece: bytes
    entry: Mapping[str, Any]


class TextLogprobs:
    """Of one reply. A token that spells parts of two pieces is told with the first of them."""

    def __init__(self, style: ReplyStyle, *, tops: int) -> None:
        """Start before the reply.

        Args:
            style: How the model writes replies.
            tops: How many of the likeliest tokens to tell of.
        """
        marks = [] if style.tool_calls is None else [FORMS[style.tool_calls].mark]
        self._marks = [mark.encode() for mark in (*marks, *(style.reasoning or ()))]
        self._tops = tops
        self._tokens: deque[_Token] = deque()
        self._reply = bytearray()
        self._found = 0  # where the last piece ended
        self._at = 0  # where the next token begins

    def take(self, entries: Logprobs, pieces: Mapping[int, bytes]) -> None:
        """Tokens that were sampled next; their text may come later.

        Args:
            entries: For each token: itself, then the likeliest ones.
            pieces: Bytes of every id in them.
        """
        told = chat_logprobs(entries, pieces, tops=self._tops)["content"]
        spelled = [pieces[token[0].token_id] for token in entries]
        self._tokens += map(_Token, spelled, told)

    def feed(self, parser: ReplyParser, text: str) -> list[ReplyEvent | ToldText]:
        """Feed a parser; what became certain, texts with what belongs to them."""
        told: list[ReplyEvent | ToldText] = []
        for char in text:
            self._reply += char.encode()
            told += self.told(parser.feed(char))
        return _joined(told)

    def told(self, events: Iterable[ReplyEvent]) -> list[ReplyEvent | ToldText]:
        """The same events, texts with what belongs to them."""
        return [
            ToldText(event.text, self._of(event.text.encode()))
            if isinstance(event, Text)
            else event
            for event in events
        ]

    def _of(self, text: bytes) -> list[Mapping[str, Any]]:
        """Of tokens that spell some of this text, which is the next piece of the reply's."""
        start = self._find(text)
        end = self._found = start + len(text)
        told = []
        while self._tokens and self._at < end:
            token = self._tokens.popleft()
            size = self._size(token.piece)
            self._at += size
            if size and self._at > start:
                told.append(token.entry)
        return told

    def _find(self, text: bytes) -> int:
        place = first = self._reply.find(text, self._found)
        while place >= 0:
            rest = bytes(self._reply[place + len(text) :].lstrip())
            if any(mark.startswith(rest) for mark in (b"", *self._marks)):
                return place
            place = self._reply.find(text, place + 1)
        return max(first, self._found)

    def _size(self, piece: bytes) -> int:
        """Bytes of the reply that a token spells: none where it is not shown."""
        shown = bytes(self._reply[self._at : self._at + len(piece)])
        if piece.startswith(shown):  # the end of it may be still to come
            return len(piece)
        return len(_REPLACED) if shown.startswith(_REPLACED[: len(shown)]) else 0


def _joined(told: Sequence[ReplyEvent | ToldText]) -> list[ReplyEvent | ToldText]:
    result: list[ReplyEvent | ToldText] = []
    for event in told:
        last = result[-1] if result else None
        if isinstance(event, ToldText) and isinstance(last, ToldText):
            result[-1] = ToldText(last.text + event.text, [*last.logprobs, *event.logprobs])
        else:
            result.append(event)
    return result
