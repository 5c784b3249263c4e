"""Whether keys that lie anywhere in a file rise, many at once.

Keys are compared as LMDB does: byte by byte, a shorter one before what it begins; those of the
free pages as numbers. Must not know of pages or trees.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# The first n of eight bytes.
_MASKS = np.array([(2 ** (8 * n) - 1) << (64 - 8 * n) for n in range(9)], np.uint64)


@dataclass(frozen=True, slots=True)
class Keys:
    """Where keys lie in the file, and their sizes in bytes; in order."""

    at: Ints
    size: Ints

    def part(self, which: Bools | Ints) -> Keys:
        """Some of them."""
        return Keys(self.at[which], self.size[which])

    def after(self, before: Keys) -> Keys:
        """They, behind the last of others."""
        return Keys(
            np.concatenate((before.at[-1:], self.at)),
            np.concatenate((before.size[-1:], self.size)),
        )


class KeyOrder:
    """Compares keys of one file; they must lie within it."""

    def __init__(self, data: mmap.mmap) -> None:
        """Look at a file of eight bytes or more; nothing is copied."""
        self._size = len(data)
        shape = (self._size - 7,)
        self._numbers: NDArray[np.uint64] = np.ndarray(shape, "=u8", data, strides=(1,))
        self._bytes: NDArray[np.uint64] = np.ndarray(shape, ">u8", data, strides=(1,))

    def all_rise(self, keys: Keys, *, passed: Ints | None = None, numbers: bool = False) -> bool:
        """Whether each key is above the one before.

        Args:
            keys: Which.
            passed: Keys whose next one is not compared with them.
            numbers: They are of eight bytes, each a number.
        """
        if len(keys.at) < 2:
            return True
        if numbers:
            begins = self._numbers[np.minimum(keys.at, self._size - 8)]  # one may be empty
        else:
            begins = self._eight(keys, 0)
        goes_up, is_same = begins[1:] > begins[:-1], begins[1:] == begins[:-1]
        if passed is not None:
            passed = passed[passed < len(goes_up)]
            goes_up[passed], is_same[passed] = True, False
        if not bool(np.all(goes_up | is_same)):
            return False
        low = np.flatnonzero(is_same)
        return not len(low) or (not numbers and self.rise(keys.part(low), keys.part(low + 1)))

    def rise(self, low: Keys, high: Keys, *, or_equal: bool = False, numbers: bool = False) -> bool:
        """Whether each of ``high`` is above its one of ``low``."""
        if numbers:
            if bool(np.any((low.size != 8) | (high.size != 8))):
                return False
            a, b = self._numbers[low.at], self._numbers[high.at]
            return bool(np.all(a <= b if or_equal else a < b))
        done = 0
        while len(low.at):
            a, b = self._eight(low, done), self._eight(high, done)
            if bool(np.any(a > b)):
                return False
            going = a == b
            low, high = low.part(going), high.part(going)
            done += 8
            ended = (low.size <= done) | (high.size <= done)
            shorter = low.size[ended] < high.size[ended]
            same = low.size[ended] == high.size[ended]
            if not bool(np.all(shorter | (same & or_equal))):
                return False
            low, high = low.part(~ended), high.part(~ended)
        return True

    def _eight(self, keys: Keys, done: int) -> NDArray[np.uint64]:
        """Eight bytes of each key from byte ``done`` on, as a number; zeros past its end."""
        at = keys.at + done
        place = np.minimum(at, self._size - 8)
        left = np.clip(keys.size - done, 0, 8)
        value = self._bytes[place].astype(np.uint64)
        if bool(np.any(place != at)):
            value = value << ((at - place) * 8).astype(np.uint64)
        if bool(np.any(left < 8)):
            value &= _MASKS[left]
        return value


def joined(parts: list[Keys]) -> Keys:
    """All of them, one after the other."""
    return Keys(np.concatenate([k.at for k in parts]), np.concatenate([k.size for k in parts]))
