"""Stop strings in a stream of text.

Text that may be the start of a stop string is held back until that is decided. The match that is
complete first wins (of those complete at the same character, the longest), so the result does not
depend on how the text was cut into pieces. One automaton for all stop strings (Aho and Corasick,
"Efficient string matching", 1975): every character is looked at once, however many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that was found.

    Attributes:
        stop: The string.
        start: Index of its first character in the text of the reply.
        token: Index of the token that completed it.
    """

    stop: str
    start: int
    token: int


class StopChecker:
    """Watches the text of one reply. One thread; O(new characters) a token.

    Args:
        stops: Strings to look for, none of them empty.
        min_tokens: The text of this many tokens is let through unseen; a match lies wholly in
            the text after it.

    Attributes:
        match: The stop string found, None until then.
    """

    __slots__ = (
        "_automaton",
        "_held",
        "_min_tokens",
        "_num_tokens",
        "_released",
        "_state",
        "match",
    )

    def __init__(self, stops: Sequence[str], min_tokens: int = 0) -> None:
        """Build the automaton: O(length of the stops)."""
        self._automaton = _Automaton(stops)
        self._state = 0
        self._held = ""
        self._released = 0
        self._num_tokens = 0
        self._min_tokens = min_tokens
        self.match: StopMatch | None = None

    def push(self, text: str) -> str:
        """Take the text of the next token (maybe empty) and give back what is safe to show.

        Once :attr:`match` is set, nothing more comes out: the text before the match was given out.
        """
        if self.match is not None:
            return ""
        self._num_tokens += 1
        return self._take(text)

    def finish(self, tail: str = "") -> str:
        """End of the reply: what is held and ``tail``, up to a stop string completed in it."""
        if self.match is not None:
            return ""
        shown = self._take(tail)
        rest, self._held = self._held, ""
        return shown + rest

    def _take(self, text: str) -> str:
        if self._num_tokens <= self._min_tokens:
            return self._release(text, len(text))
        automaton = self._automaton
        if not self._state and automaton.first.isdisjoint(text):
            return self._release(text, len(text))
        buffer = self._held + text
        for index, char in enumerate(text, start=len(self._held)):
            self._state = automaton.step(self._state, char)
            stop = automaton.ending[self._state]
            if stop:
                return self._found(stop, buffer, index + 1 - len(stop))
        return self._release(buffer, len(buffer) - automaton.depth[self._state])

    def _found(self, stop: str, buffer: str, start: int) -> str:
        self.match = StopMatch(stop, self._released + start, self._num_tokens - 1)
        return self._release(buffer[:start], start)

    def _release(self, buffer: str, size: int) -> str:
        self._held = buffer[size:]
        self._released += size
        return buffer[:size]


class _Automaton:
    """States are prefixes of stop strings; 0 is the empty one. Immutable once built.

    Attributes:
        first: First characters of the stop strings.
        depth: Length of each state's prefix: that much of the text may become a stop string.
        ending: The longest stop string that each state ends in, ``""`` for none.
    """

    __slots__ = ("_back", "_next", "depth", "ending", "first")

    def __init__(self, stops: Sequence[str]) -> None:
        self.first = frozenset(stop[0] for stop in stops)
        self.depth = [0]
        self.ending = [""]
        self._next: list[dict[str, int]] = [{}]
        for stop in stops:
            state = 0
            for size, char in enumerate(stop, start=1):
                state = self._next[state].setdefault(char, len(self.depth))
                if state == len(self.depth):
                    self.depth.append(size)
                    self.ending.append("")
                    self._next.append({})
            self.ending[state] = stop
        self._back = self._link()

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while state and char not in self._next[state]:
            state = self._back[state]
        return self._next[state].get(char, 0)

    def _link(self) -> list[int]:
        """For each state the longest other state that it ends in, breadth first."""
        self._back = back = [0] * len(self.depth)
        queue = [0]
        for state in queue:
            for char, child in self._next[state].items():
                queue.append(child)
                if state:
                    back[child] = self.step(back[state], char)
                    self.ending[child] = self.ending[child] or self.ending[back[child]]
        return back
