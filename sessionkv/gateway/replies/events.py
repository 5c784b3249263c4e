"""What a reply is made of, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the reader; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thought before it answered; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A tool call; calls of a reply are counted from 0 and never overlap."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments; together they are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    """The call is complete. One that the reply's end cut off, or that went wrong, has no such."""

    index: int


ReplyEvent = Text | Reasoning | CallBegins | CallArguments | CallEnds


def joined(events: list[ReplyEvent]) -> list[ReplyEvent]:
    """The same with neighbouring pieces of one thing as one event."""
    result: list[ReplyEvent] = []
    for event in events:
        match result[-1] if result else None, event:
            case Text(text), Text(more):
                result[-1] = Text(text + more)
            case Reasoning(text), Reasoning(more):
                result[-1] = Reasoning(text + more)
            case CallArguments(index, text), CallArguments(same, more) if index == same:
                result[-1] = CallArguments(index, text + more)
            case _:
                result.append(event)
    return result
