"""How much of something that is bounded for all each one holds, and who may have more.

::

    | share of a | share of b | share of c |     limit = 3 shares
    | aaaaaaaaaaaaaaaaaaa | bb |           |     a has more than its share while there is room
                               | cccccccccc |    and b and c get theirs, whatever a has

Whoever asks for no more than its *share*, the limit divided by those who hold any, gets it, also
where all together are at the limit; past its share one gets more only while all together stay
within it. So one alone may have everything and nobody can take from others what is theirs. All
together may be past the limit by that: of ``n`` who come one after another and each take all they
can, the last gets an ``n``-th, so they have at most ``1 + 1/2 + ... + 1/n`` times the limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


class Holdings:
    """Amounts by holder; for one thread. All O(1) unless they say otherwise."""

    def __init__(self, held: Mapping[str, int] | None = None) -> None:
        """With what is held already."""
        self._held = Counter({who: amount for who, amount in (held or {}).items() if amount > 0})
        self.total = sum(self._held.values())
        """Of all together."""

    def of(self, who: str) -> int:
        """What one holds."""
        return self._held[who]

    def add(self, who: str, amount: int) -> None:
        """Somebody holds so much more, or less."""
        self.total += amount
        left = self._held[who] + amount
        if left > 0:
            self._held[who] = left
        else:
            self._held.pop(who, None)

    def share(self, who: str, limit: int) -> int:
        """What is surely there for one, of ``limit`` for all."""
        return limit // (len(self._held) + (who not in self._held))

    def has_room(self, who: str, limit: int, more: int = 1) -> bool:
        """Whether one may have so much more."""
        return self.total + more <= limit or self.of(who) + more <= self.share(who, limit)

    def largest(self) -> str | None:
        """Who holds most; None where nobody holds any. O(holders)."""
        return max(self._held, key=lambda who: self._held[who], default=None)
