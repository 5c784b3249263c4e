"""Ids spelled out as raw text, to compare them with what a template writes."""

from __future__ import annotations

from collections.abc import Sequence

from sessionkv.text.control import ControlMarks
from sessionkv.text.detokenizer import Detokenizer
from sessionkv.text.vocabulary import Vocabulary


class Speller:
    """Spells ids as raw text (see :mod:`sessionkv.text.control`).

    Control tokens are spelled as themselves, text that only looks like one is marked.
    """

    def __init__(self, vocabulary: Vocabulary, marks: ControlMarks) -> None:
        """Combine the two."""
        self._shown = vocabulary.shown
        self._spellings = vocabulary.spellings
        self._marks = marks

    def spell(self, ids: Sequence[int]) -> str:
        """Raw text of ids that stand behind other text. O(ids)."""
        parts: list[str] = []
        run: list[int] = []
        for token_id in ids:
            spelling = self._spellings.get(token_id)
            if spelling is None:
                run.append(token_id)
            else:
                parts += (self._plain(run), spelling)
                run = []
        return "".join((*parts, self._plain(run)))

    def stands_at(self, spelled: str, raw: str, start: int) -> bool:
        """Whether ``raw`` has at ``start`` what ids spell, and no control token goes on there."""
        end = start + len(spelled)
        return raw.startswith(spelled, start) and not self._marks.cuts(raw, end)

    def common(self, ids: Sequence[int], raw: str, start: int) -> tuple[int, int]:
        """How many leading ids spell what ``raw`` has from ``start`` on, and its length. O(ids).

        Never ends inside a character or a control token.
        """
        detokenizer = Detokenizer(self._shown)
        ends = [(0, 0)]
        size = 0
        text = ""
        for index, token_id in enumerate(ids):
            text += detokenizer.push_one(token_id)
            if not raw.startswith(text, start + size):
                break
            if not detokenizer.pending:
                size += len(text)
                text = ""
                ends.append((index + 1, size))
        while len(ends) > 1 and self._marks.cuts(raw, start + ends[-1][1]):
            ends.pop()
        count, size = ends[-1]
        return (count, size) if raw[start : start + size] == self.spell(ids[:count]) else (0, 0)

    def _plain(self, ids: Sequence[int]) -> str:
        detokenizer = Detokenizer(self._shown)
        return self._marks.mark(detokenizer.push(ids) + detokenizer.finish())
