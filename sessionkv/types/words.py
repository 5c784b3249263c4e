"""Numbers as messages show them."""

from __future__ import annotations

_EXACT = 2**53
"""Up to here every whole number is a float of its own."""


def number(value: float) -> str:
    """Whole numbers with thousands separators (``2,147,483,647``), others as ``:g``."""
    if abs(value) <= _EXACT and float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:g}"
