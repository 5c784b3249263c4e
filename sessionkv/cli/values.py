"""Numbers and times as they are typed. Standard library only; what is wrong is said in words."""

from __future__ import annotations

import argparse
import math

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
_MOST_SHOWN = 40


def number(text: str) -> float:
    """A finite number, for argparse.

    Raises:
        ArgumentTypeError: It is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise _wrong(text, "a number, such as 0.5")
    return value


def whole_number(text: str) -> int:
    """A whole number, for argparse.

    Raises:
        ArgumentTypeError: It is none.
    """
    try:
        return int(text)
    except ValueError:
        raise _wrong(text, "a whole number, such as 3") from None


def seconds(text: str) -> float:
    """Seconds of ``90``, ``30m`` or ``2d``, for argparse.

    Raises:
        ArgumentTypeError: It is none of these.
    """
    value = age_s(text if text[-1:] in _UNITS_S else f"{text}s")
    if value is None:
        raise _wrong(text, "seconds, or a number and one of s, m, h, d, w, as in 30m or 2d")
    return value


def age_s(text: str) -> float | None:
    """Seconds of ``12h`` or ``30d``; None where it is neither."""
    amount, unit = text[:-1], text[-1:]
    if unit not in _UNITS_S or not amount.replace(".", "", 1).isascii() or not amount[:1].isdigit():
        return None
    try:
        value = float(amount) * _UNITS_S[unit]
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _wrong(text: str, allowed: str) -> argparse.ArgumentTypeError:
    shown = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
    return argparse.ArgumentTypeError(f"{shown!r} is not allowed; allowed: {allowed}")
