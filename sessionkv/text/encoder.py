"""Text to token ids: whole texts, and pieces of a conversation that stand in the middle of one.

Rules: text without spelled control tokens gets exactly the ids of tokenising it as it is; a
spelled one is encoded apart, with control tokens off (so a tokenizer that puts a space before
every segment of a text puts one behind it). A piece that follows other ids is encoded
behind an anchor, whose ids are then taken off, so that it neither gets the space that some
tokenizers put at the start of a text nor merges with what is before it. Never adds a BOS.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from sessionkv.text.control import ControlMarks
from sessionkv.text.vocabulary import Vocabulary


class Encoder:
    """Encodes raw texts (see :mod:`sessionkv.text.control`).

    One thread: it switches the tokenizer's control tokens off and on again.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, marks: ControlMarks) -> None:
        """Find the anchor; truncation and padding of the tokenizer are turned off."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._marks = marks
        probes = ("x", " x", "xy z", "\nx", "é")
        self._anchor = self._find_anchor(("", *vocabulary.control, "\n", "."), probes)
        tokenizer.encode_special_tokens = True
        self._plain_anchor = self._find_anchor(("", "\n", "."), tuple(vocabulary.control))
        tokenizer.encode_special_tokens = False

    def encode(self, raw: str) -> tuple[int, ...]:
        """Ids of a whole text, from its start."""
        text, spans = self._marks.unmark(raw)
        if not spans:
            return self._ids(text)
        return self._encode_spelled(text, spans)

    def encode_behind(self, raw: str, before: Sequence[int]) -> tuple[int, ...]:
        """Ids of a text that stands behind the ids ``before``, of which the last one matters.

        Behind a control token a text is encoded as it would be in one piece with it.
        """
        if not before:
            return self.encode(raw)
        control = self._vocabulary.spellings.get(before[-1])
        return self.encode_inside(raw) if control is None else self.encode(control + raw)[1:]

    def encode_inside(self, raw: str) -> tuple[int, ...]:
        """Ids of a text that stands behind ordinary text."""
        if not raw or self._marks.first(raw) is not None:
            return self.encode(raw)
        return self.encode(self._anchor + raw)[len(self._ids(self._anchor)) :]

    def encode_text_inside(self, text: str) -> tuple[int, ...]:
        """As :meth:`encode_inside` for plain text, in which no control token is real."""
        return self.encode_inside(self._marks.mark(text))

    def _encode_spelled(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """The tokenizer finds spelled control tokens too; replace those by their plain ids."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        rest = iter(spans)
        start, end = next(rest)
        for token_id, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
            while end <= first:
                start, end = next(rest, (len(text), len(text) + 1))
            if token_id in self._vocabulary.spellings and start < last:
                ids += self._encode_plain(text[first:last])
            else:
                ids.append(token_id)
        return tuple(ids)

    def _encode_plain(self, text: str) -> tuple[int, ...]:
        """Ids with control tokens off, as if behind ordinary text."""
        self._tokenizer.encode_special_tokens = True
        try:
            return self._behind(self._plain_anchor, text)
        finally:
            self._tokenizer.encode_special_tokens = False

    def _behind(self, anchor: str, text: str) -> tuple[int, ...]:
        return self._ids(anchor + text)[len(self._ids(anchor)) :]

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _find_anchor(self, anchors: Sequence[str], probes: Sequence[str]) -> str:
        """The first anchor behind which the probes keep their own ids and gain no space.

        The empty one where there is none.
        """
        for anchor in anchors:
            own = self._ids(anchor)
            encoded = [(probe, self._ids(anchor + probe)) for probe in probes]
            if all(
                ids[: len(own)] == own and self._spell(ids[len(own) :]) == probe.encode()
                for probe, ids in encoded
            ):
                return anchor
        return ""

    def _spell(self, ids: Sequence[int]) -> bytes:
        return b"".join([self._vocabulary.shown[i] for i in ids])
