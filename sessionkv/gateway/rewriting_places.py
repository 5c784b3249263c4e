"""Puts what :mod:`sessionkv.gateway.rewriting` took out back in, where it costs no cache.

A reminder that the client has moved stays where it was said first: the model sees it once, as it
was sent. One that the client no longer sends is not seen any more, whatever that costs. A date is
said at the end of the message that was the newest when it was new, and stays there: a later one is
said later, as a person would. Everything else is where the client has it.

Where things were put is kept with the turn, so that the next request finds them there after a
restart too. A place holds as long as the conversation up to and with its message is the same, what
was taken out left aside: behind what a client has edited or cut out, all is as in a new one. So
nothing is ever put into what the assistant said.

Nothing is lost or made up: each reminder of the request is in the result exactly once, and so is
its date, behind earlier dates of the same conversation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sessionkv.gateway.rewriting import Piece, Steady, with_text
from sessionkv.gateway.transcript import Message, Transcript, text_of

METADATA = "places"
MAX_DATES = 50
"""Said in one conversation; behind them it begins anew with the newest one."""
_DIGEST_CHARS = 16


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece was put: its own fields, and of a reminder only what it is known by.

    Attributes:
        up_to: Digest of the conversation up to and with the message that it was put to.
    """

    kind: str
    key: str
    at: int
    side: str
    lead: str
    trail: str
    up_to: str

    def to_list(self) -> list[Any]:
        """For the turn's metadata."""
        return [self.kind, self.key, self.at, self.side, self.lead, self.trail, self.up_to]


@dataclass(frozen=True, slots=True)
class Placed:
    """A conversation for the engine.

    Attributes:
        transcript: What the model is to see.
        places: Where the pieces are in it, to be kept with the turn.
        rewrites: What is elsewhere than the client has it, for the report.
    """

    transcript: Transcript
    places: Sequence[Place]
    rewrites: Sequence[Mapping[str, str]]

    @property
    def metadata(self) -> dict[str, Any] | None:
        """What is to be kept with the turn."""
        return {METADATA: [place.to_list() for place in self.places]} if self.places else None


def places_of(metadata: Mapping[str, Any]) -> tuple[Place, ...]:
    """Those that were kept with a turn."""
    listed = metadata.get(METADATA)
    values = listed if isinstance(listed, list) else []
    return tuple(Place(*value) for value in values if isinstance(value, list) and len(value) == 7)


def is_told(found: Steady, places: Sequence[Place]) -> bool:
    """Whether the newest dates at these places are those that a request tells."""
    told = {piece.key for piece in found.pieces if piece.kind == "date"}
    dates = [place.key for place in places if place.kind == "date"]
    return told == set(dates[-_sources(found) :])


def dates_digest(found: Steady) -> str:
    """Of the dates that a request tells."""
    told = "\n".join(piece.key for piece in found.pieces if piece.kind == "date")
    return hashlib.sha256(told.encode()).hexdigest()[:_DIGEST_CHARS]


def put_back(found: Steady, earlier: Sequence[Place]) -> Placed:
    """Make a conversation whole again. O(its length).

    Args:
        found: What was taken apart.
        earlier: Places in the conversation that it goes on from; none for a new one.
    """
    digests = _up_to(found.transcript)
    kept = [p for p in earlier if p.at < len(digests) and p.up_to == digests[p.at]]
    dates = _dates(found, kept)
    unused = [place for place in kept if place.kind != "date"]
    placed: list[tuple[Place, Piece]] = []
    for piece in found.pieces:
        if piece.kind == "date":
            if not dates or all(date.key != piece.key for date in dates[-_sources(found) :]):
                at = _newest(found.transcript.messages)
                dates.append(_place(piece, at, digests))
            continue
        before = next((p for p in unused if p.key == piece.key and p.at <= piece.at), None)
        if before is not None:
            unused.remove(before)
        placed.append((before or _place(piece, piece.at, digests), piece))
    return _Writing(found, dates, placed).result()


def _up_to(transcript: Transcript) -> list[str]:
    """For each message, a digest of the conversation so far; none for the system's at the start."""
    digests = [digest[:_DIGEST_CHARS] for digest in transcript.all_digests()]
    return [*[""] * transcript.num_system, *digests]


def _dates(found: Steady, kept: Sequence[Place]) -> list[Place]:
    """Those said before; none where the client tells none, as then they are not of its own."""
    dates = [place for place in kept if place.kind == "date"]
    tells = any(piece.kind == "date" for piece in found.pieces)
    return dates if tells and len(dates) < MAX_DATES else []


def _sources(found: Steady) -> int:
    """How many dates a request tells: so many of the latest are the ones that hold."""
    return max(1, sum(piece.kind == "date" for piece in found.pieces))


def _newest(messages: Sequence[Message]) -> int:
    """The last message that is not the assistant's."""
    return next(
        (i for i in range(len(messages) - 1, -1, -1) if messages[i].get("role") != "assistant"), 0
    )


def _place(piece: Piece, at: int, digests: Sequence[str]) -> Place:
    return Place(piece.kind, piece.key, at, piece.side, piece.lead, piece.trail, digests[at])


@dataclass(frozen=True, slots=True)
class _Writing:
    found: Steady
    dates: Sequence[Place]
    placed: Sequence[tuple[Place, Piece]]

    def result(self) -> Placed:
        messages: list[Message] = []
        fields: list[str] = []
        for index, message in enumerate(self.found.transcript.messages):
            field = self.found.transcript.field(index)
            here = [(place, piece) for place, piece in self.placed if place.at == index]
            texts = [date.key for date in self.dates if date.at == index]
            head = _joined(here, "head")
            tail = _joined(here, "tail") + "".join(f"\n\n<env>\n{text}\n</env>" for text in texts)
            if head or tail:
                message = with_text(message, head + text_of(message) + tail)
            messages.append(message)
            fields.append(field)
            if own := _joined(here, "own"):
                messages.append({"role": "user", "content": own})
                fields.append(next(piece.field for place, piece in here if place.side == "own"))
        transcript = Transcript(messages, self.found.transcript.tools, fields)
        places = [*self.dates, *(place for place, _ in self.placed)]
        return Placed(transcript, places, self._rewrites())

    def _rewrites(self) -> list[dict[str, str]]:
        told = self.found.transcript.field
        rewrites = [
            {"field": piece.field, "moved": "system-reminder", "to": told(place.at)}
            for place, piece in self.placed
            if (place.at, place.side) != (piece.at, piece.side)
        ]
        for piece in self.found.pieces:
            if piece.kind == "date":
                at = next(date.at for date in reversed(self.dates) if date.key == piece.key)
                rewrites.append({"field": piece.field, "moved": piece.text, "to": told(at)})
        return rewrites


def _joined(here: Sequence[tuple[Place, Piece]], side: str) -> str:
    return "".join(p.lead + piece.text + p.trail for p, piece in here if p.side == side)
