"""How much of a text has to be held back because it may be the beginning of a mark."""

from __future__ import annotations


def longest_start(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that begins ``mark`` without being all of it."""
    most = min(len(text), len(mark) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(mark[:n])), 0)
