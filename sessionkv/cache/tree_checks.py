"""What callers of the tree may say: names, pins and counts, checked before anything moves."""

from __future__ import annotations

import math

from sessionkv.errors import InvalidRequest
from sessionkv.types import Tier

MAX_PRIORITY = 100
MAX_TTL_S = 10 * 365 * 24 * 3600.0


def check_name(field: str, name: object, max_bytes: int) -> None:
    """See whether ``name`` may be a session's name.

    Raises:
        InvalidRequest: Not text, empty, too long, with NUL or with a lone surrogate.
    """
    allowed = f"1 to {max_bytes:g} bytes of UTF-8 without NUL"
    if not isinstance(name, str):
        raise InvalidRequest(field, name, allowed)
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(field, name, f"{allowed} and without lone surrogates") from None
    if not 1 <= size <= max_bytes or "\0" in name:
        raise InvalidRequest(field, name, allowed)


def check_turns(turns: object) -> None:
    """See whether ``turns`` is a number of turns to take back.

    Raises:
        InvalidRequest: It is not an integer from 1.
    """
    if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
        raise InvalidRequest("turns", turns, "an integer from 1")


def check_pin(tier: object, ttl_s: object, priority: object) -> Tier:
    """The tier that a pin speaks of.

    Raises:
        InvalidRequest: Tier, time or priority is not allowed.
    """
    if tier not in [known.value for known in Tier]:
        raise InvalidRequest("tier", tier, "device, host or disk")
    if ttl_s is not None and not (
        isinstance(ttl_s, int | float)
        and not isinstance(ttl_s, bool)
        and math.isfinite(ttl_s)
        and 0 < ttl_s <= MAX_TTL_S
    ):
        raise InvalidRequest("ttl_s", ttl_s, f"seconds above 0 up to {MAX_TTL_S:g}, or null")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidRequest("priority", priority, f"an integer from 0 to {MAX_PRIORITY}")
    if not 0 <= priority <= MAX_PRIORITY:
        raise InvalidRequest("priority", priority, f"an integer from 0 to {MAX_PRIORITY}")
    return Tier(tier)
