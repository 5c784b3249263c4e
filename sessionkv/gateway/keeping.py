"""What a request's parameters and headers say about keeping its conversation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from sessionkv.gateway.helpers import is_helper
from sessionkv.gateway.transcript import Transcript

HEADERS = (
    "x-session-id",
    "x-claude-code-session-id",
    "session-id",
    "x-session-affinity",
    "x-opencode-session",
    "x-dynamo-session-id",
)
"""In which agents name a conversation; with ``_`` for ``-`` too."""
DAY_S = 24 * 3600.0
STEADY = "x-sessionkv-steady"
IN_MEMORY_S = 600.0
"""How long ``in_memory`` wants a cache kept: at least the minutes that the hosted API keeps it."""
_SESSION = re.compile(r"session_(?:id\"\s*:\s*\")?([0-9a-fA-F]{8}-[0-9a-fA-F-]{27})")


@dataclass(frozen=True, slots=True)
class Keeping:
    """What becomes of an exchange.

    Attributes:
        is_helper: Nothing is kept: it only serves another conversation (a title, a summary).
        tier: Where its cache is wanted, None for no wish.
        ttl_s: How long.
        label: The client's own name of the conversation; None is how it begins.
        is_steady: What agents move around in it is put where it costs no cache; None is as the
            gateway is set.
    """

    is_helper: bool = False
    tier: str | None = None
    ttl_s: float | None = None
    label: str | None = None
    is_steady: bool | None = None


class _Asks(Protocol):
    @property
    def session_id(self) -> str | None: ...
    @property
    def prompt_cache_key(self) -> str | None: ...
    @property
    def metadata(self) -> Mapping[str, Any] | None: ...
    @property
    def prompt_cache_retention(self) -> str | None: ...


def keeping_of(
    body: _Asks, transcript: Transcript, headers: Mapping[str, str], *, max_tokens: int | None
) -> Keeping:
    """From the parameters that OpenAI's APIs share."""
    helper = is_helper(transcript, headers=headers, metadata=body.metadata, max_tokens=max_tokens)
    label = body.session_id or body.prompt_cache_key or named(headers)
    keeping = Keeping(is_helper=helper, label=label, is_steady=says_steady(headers))
    if helper or body.prompt_cache_retention is None:
        return keeping
    if body.prompt_cache_retention == "24h":
        return replace(keeping, tier="disk", ttl_s=DAY_S)
    return replace(keeping, tier="host", ttl_s=IN_MEMORY_S)


def says_steady(headers: Mapping[str, str]) -> bool | None:
    """Whether a request wants what moves in it put where it costs no cache; None is as set."""
    said = headers.get(STEADY)
    return None if said is None else said.strip().lower() in ("true", "1", "yes")


def session_in(user_id: str | None) -> str | None:
    """The conversation's name as Claude Code puts it into the id of its user."""
    found = None if user_id is None else _SESSION.search(user_id)
    return None if found is None else found[1]


def named(headers: Mapping[str, str]) -> str | None:
    """The conversation's name as agents send it in a header."""
    given = {name.lower().replace("_", "-"): value for name, value in headers.items()}
    return next((given[name] for name in HEADERS if given.get(name)), None)
