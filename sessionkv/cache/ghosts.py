"""What a larger tier would have kept: keys that left one lately, and how far back they were wanted.

A key that was dropped when ``d`` others have been dropped after it would still be there in a tier
of ``d + 1`` more blocks, as far as the tier goes by last use. So each look-up of a dropped key is
counted under its distance, in powers of two. Keys alone, in bounded number; O(1) a key.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from sessionkv.types import BlockHash

MAX_GHOSTS = 65_536


class Ghosts:
    """The keys that left one tier last.

    Attributes:
        num_wanted: Look-ups that a larger tier would have answered, however large.
    """

    def __init__(self, limit: int = MAX_GHOSTS) -> None:
        """Nothing has left."""
        self._limit = limit
        self._left_at: OrderedDict[BlockHash, int] = OrderedDict()  # its first goes in O(1)
        self._num_left = 0
        self._wanted: Counter[int] = Counter()
        self.num_wanted = 0

    def __len__(self) -> int:
        """Keys remembered."""
        return len(self._left_at)

    def left(self, keys: Iterable[BlockHash]) -> None:
        """These were dropped, in this order."""
        left_at = self._left_at
        for key in keys:
            left_at.pop(key, None)
            self._num_left += 1
            left_at[key] = self._num_left
        while len(left_at) > self._limit:
            left_at.popitem(last=False)

    def look_up(self, keys: Iterable[BlockHash]) -> None:
        """These were wanted and are not in the tier; each counts once for each time it left."""
        for key in keys:
            at = self._left_at.pop(key, None)
            if at is not None:
                self.num_wanted += 1
                self._wanted[(self._num_left - at).bit_length()] += 1

    def by_size(self) -> list[tuple[int, int]]:
        """``(blocks more, look-ups that they would have answered)``, for each power of two."""
        found, total = [], 0
        for exponent in range(max(self._wanted, default=-1) + 1):
            total += self._wanted[exponent]
            found.append((1 << exponent, total))
        return found
