"""What a request's parameters and headers say about keeping its conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from sessionkv.gateway.conversations import Keeping
from sessionkv.gateway.helpers import is_helper
from sessionkv.gateway.transcript import Transcript

HEADERS = (
    "x-session-id",
    "session-id",
    "x-session-affinity",
    "x-opencode-session",
    "x-dynamo-session-id",
)
"""In which agents name a conversation; with ``_`` for ``-`` too."""
DAY_S = 24 * 3600.0
IN_MEMORY_S = 600.0
"""How long ``in_memory`` wants a cache kept: at least the minutes that the hosted API keeps it."""


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
    label = body.session_id or body.prompt_cache_key or name_in(headers)
    if helper or body.prompt_cache_retention is None:
        return Keeping(is_helper=helper, label=label)
    if body.prompt_cache_retention == "24h":
        return Keeping(tier="disk", ttl_s=DAY_S, label=label)
    return Keeping(tier="host", ttl_s=IN_MEMORY_S, label=label)


def name_in(headers: Mapping[str, str]) -> str | None:
    """The conversation's name as agents send it in a header."""
    given = {name.lower().replace("_", "-"): value for name, value in headers.items()}
    return next((given[name] for name in HEADERS if given.get(name)), None)
