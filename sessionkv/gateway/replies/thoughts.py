"""Parts the reasoning at the start of a reply from what follows it."""

from __future__ import annotations

import enum

from sessionkv.gateway.replies.held import longest_start


class _At(enum.Enum):
    START = enum.auto()  # the opening may come
    INSIDE = enum.auto()
    BEHIND = enum.auto()


class Thoughts:
    """Splits one reply. Whitespace at both ends of the reasoning is no part of it.

    Attributes:
        found: There was reasoning, if only its opening.
    """

    __slots__ = ("_at", "_close", "_held", "_is_blank", "_open", "_space", "found")

    def __init__(self, marks: tuple[str, str], *, starts_inside: bool) -> None:
        """Start before the reply; ``starts_inside`` where the prompt has opened the reasoning.

        A model that opens it once more all the same is understood.
        """
        self._open, self._close = marks
        self.found = starts_inside
        self._at = _At.START
        self._held = ""  # what may be the beginning of a mark, with the space before an opening
        self._space = ""  # space that belongs to the reasoning if something follows
        self._is_blank = True  # nothing of the reasoning was given out

    def feed(self, text: str) -> tuple[str, str]:
        """Take the next piece; returns what is certain of the reasoning, and of what follows it."""
        if self._at is _At.BEHIND:
            return "", text
        data, self._held = self._held + text, ""
        if self._at is _At.START:
            rest = data.lstrip()
            if len(rest) < len(self._open) and self._open.startswith(rest):
                self._held = data
                return "", ""
            if rest.startswith(self._open):
                self.found, data = True, rest[len(self._open) :]
            self._at = _At.INSIDE if self.found else _At.BEHIND
            if not self.found:
                return "", data
        return self._inside(data)

    def end(self) -> tuple[str, str]:
        """The reply is over: what was held back."""
        held, self._held = self._held, ""
        if self._at is _At.START and not self.found:
            return "", held
        return self._said(held) if held.strip() else "", ""

    def _inside(self, data: str) -> tuple[str, str]:
        thought, found, rest = data.partition(self._close)
        if found:
            said = self._said(thought)
            self._at = _At.BEHIND
            return said, rest
        size = len(data) - longest_start(data, self._close)
        self._held = data[size:]
        return self._said(data[:size]), ""

    def _said(self, text: str) -> str:
        text = self._space + text
        if self._is_blank:
            text = text.lstrip()
        body = text.rstrip()
        self._space = text[len(body) :]
        self._is_blank = self._is_blank and not body
        return body
