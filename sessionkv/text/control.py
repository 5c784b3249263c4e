"""Keeps control tokens that are only spelled in somebody's text apart from real ones.

Before rendering, every control token spelled in a message or tool is replaced by a *mark*: two
private-use characters that no template looks at. After rendering, what still is spelled out came
from the template and is real; marks turn back into text that the encoder treats as plain. A text
with marks in it is called *raw* in this package. Knows nothing of tokenizers or templates.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

_ESCAPE = "\U0010fffd"  # the last private-use character; spelled in a text, it is marked itself
_FIRST = 0x100000  # plane 16: the second character of a mark says which spelling


class ControlMarks:
    """Marks and unmarks spelled control tokens. Immutable; costs one regex scan of the text."""

    def __init__(self, spellings: Collection[str]) -> None:
        """Take the spellings of the control tokens; none may be empty."""
        known = sorted(spellings, key=lambda s: (-len(s), s))  # longest first, as tokenizers match
        self._texts = [_ESCAPE, *known]
        self._marks = {text: _ESCAPE + chr(_FIRST + i) for i, text in enumerate(self._texts)}
        self._spelled = re.compile("|".join(map(re.escape, self._texts)))
        last = chr(_FIRST + len(known))
        self._marked = re.compile(f"{_ESCAPE}([{chr(_FIRST)}-{last}])")
        self._endings = tuple(known)
        self._longest = max(map(len, known), default=0)
        self._real = re.compile("|".join(map(re.escape, known)) or r"(?!)")

    def mark(self, text: str) -> str:
        """Replace spelled control tokens by marks."""
        return self._spelled.sub(lambda match: self._marks[match[0]], text)

    def escape(self, text: str) -> str:
        """Raw text in which control tokens are real as they are spelled."""
        return text.replace(_ESCAPE, self._marks[_ESCAPE])

    def mark_value(self, value: Any) -> Any:
        """As :meth:`mark` for every string in a plain value, keys included."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, Mapping):
            return {self.mark(str(k)): self.mark_value(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark_value(item) for item in value]
        return value

    def unmark(self, raw: str) -> tuple[str, list[tuple[int, int]]]:
        """Turn marks back into text; also the ``(start, end)`` of each in the result, ascending."""
        if _ESCAPE not in raw:
            return raw, []
        parts: list[str] = []
        spans: list[tuple[int, int]] = []
        size = last = 0
        for match in self._marked.finditer(raw):
            text = self._texts[ord(match[1]) - _FIRST]
            before = raw[last : match.start()]
            size += len(before)
            spans.append((size, size + len(text)))
            size += len(text)
            parts += (before, text)
            last = match.end()
        parts.append(raw[last:])
        return "".join(parts), spans

    def first(self, raw: str) -> str | None:
        """The real control token that ``raw`` begins with, or None."""
        match = self._real.match(raw)
        return match[0] if match else None

    def without(self, raw: str, *, but: Collection[str] = ()) -> str:
        """``raw`` without its real control tokens, which the text of a reply does not show."""
        return self._real.sub(lambda match: match[0] if match[0] in but else "", raw)

    def cuts(self, raw: str, at: int) -> bool:
        """Whether index ``at`` lies inside a real control token."""
        matches = (self._real.match(raw, i) for i in range(max(0, at - self._longest + 1), at))
        return any(match is not None and match.end() > at for match in matches)

    def parts(self, before: str, after: str) -> bool:
        """Whether a real control token stands where two raw texts meet: they encode apart."""
        return self.first(after) is not None or before.endswith(self._endings)
