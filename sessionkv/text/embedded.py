"""Answers among what came in: a client that sends everything again sends them along.

Where a conversation was changed, its answers behind the change belong to no turn of their own any
more. Their ids still stand in the log, between the template's own opening and end of an answer, and
are taken from there, so that the next turn writes the same ids again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sessionkv.text.model import TextModel


@dataclass(frozen=True, slots=True)
class EmbeddedAnswer:
    """One answer in a log.

    Attributes:
        start: Where its opening begins.
        end: Where the answer ends, its end token included.
        ids: Its own, without the opening.
    """

    start: int
    end: int
    ids: tuple[int, ...]


def answers_in(text: TextModel, ids: Sequence[int]) -> list[EmbeddedAnswer]:
    """All whole answers, first to last; none where the template has no single end of one.

    O(ids). The opening of the answer that is still to come has no end, and is none.
    """
    closing, opening = text.closing_id, text.renderer.habits.opening
    mark = text.encoder.encode(opening) if opening else ()
    if closing is None or not mark:
        return []
    found: list[EmbeddedAnswer] = []
    log = tuple(ids)
    at = 0
    while (start := _find(log, mark, at)) is not None:
        begin = start + len(mark)
        try:
            at = log.index(closing, begin)  # the next opening may begin with it
        except ValueError:
            break
        found.append(EmbeddedAnswer(start, at + 1, log[begin : at + 1]))
    return found


def _find(log: tuple[int, ...], mark: tuple[int, ...], at: int) -> int | None:
    while True:
        try:
            at = log.index(mark[0], at)
        except ValueError:
            return None
        if log[at : at + len(mark)] == mark:
            return at
        at += 1
