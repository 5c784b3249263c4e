"""Sums of conversations: what their events came to, so that old events need not stay. Pure.

A sum is a document cut in pieces, since a session keeps no more than 64 KiB beside its turns. It
counts when all of its pieces are there; events before it then count no more.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PIECE_CHARS = 48 * 1024
_SUM = re.compile(r"s([0-9]{4})-([0-9]{4})", re.ASCII)


@dataclass(frozen=True, slots=True)
class ConversationEvent:
    """Something that happened in a conversation, or a piece of the sum of what did.

    Attributes:
        number: Counted from 0; of a sum that of the first event that is not in it.
        kind: ``m``, ``i``, ``r`` or ``d``; of a sum ``s``, its piece and how many there are.
        session: What holds it.
        node: The turn or root that it is.
    """

    number: int
    kind: str
    session: str
    node: str

    @property
    def piece(self) -> tuple[int, int] | None:
        """Which piece of a sum it is, and of how many; None of an event."""
        found = _SUM.fullmatch(self.kind)
        return None if found is None else (int(found[1]), int(found[2]))


def kinds_of(pieces: Sequence[str]) -> list[str]:
    """Kinds of a sum's pieces."""
    return [f"s{index:04}-{len(pieces):04}" for index in range(len(pieces))]


def in_force(found: Iterable[ConversationEvent]) -> list[ConversationEvent]:
    """The newest sum that is whole, and what happened since, in order."""
    listed = list(found)
    pieces: dict[int, list[ConversationEvent]] = {}
    for event in listed:
        if event.piece is not None:
            pieces.setdefault(event.number, []).append(event)
    whole = [number for number, some in pieces.items() if len(some) == (some[0].piece or (0, 0))[1]]
    start = max(whole, default=0)
    since = [event for event in listed if event.number >= start and event.piece is None]
    return [
        *sorted(pieces[start] if whole else (), key=lambda event: event.kind),
        *sorted(since, key=lambda event: event.number),
    ]


def packed(document: Mapping[str, Any]) -> list[str]:
    """A document in pieces that can be kept; the same ones each time."""
    written = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    text = base64.b64encode(zlib.compress(written)).decode()
    return [text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)]


def unpacked(pieces: Iterable[str]) -> dict[str, Any]:
    """The way back from :func:`packed`."""
    document: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode("".join(pieces))))
    return document
