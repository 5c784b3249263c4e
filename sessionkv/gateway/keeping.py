"""What a request's parameters and headers say about keeping its conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from sessionkv.gateway.conversations import Keeping
from sessionkv.gateway.helpers import is_helper
from sessionkv.gateway.transcript import Transcript

DAY_S = 24 * 3600.0
IN_MEMORY_S = 600.0
"""How long ``in_memory`` wants a cache kept: at least the minutes that the hosted API keeps it."""


class _Asks(Protocol):
    @property
    def metadata(self) -> Mapping[str, Any] | None: ...
    @property
    def prompt_cache_retention(self) -> str | None: ...


def keeping_of(
    body: _Asks, transcript: Transcript, headers: Mapping[str, str], *, max_tokens: int | None
) -> Keeping:
    """From the parameters that OpenAI's APIs share."""
    helper = is_helper(transcript, headers=headers, metadata=body.metadata, max_tokens=max_tokens)
    if helper or body.prompt_cache_retention is None:
        return Keeping(is_helper=helper)
    if body.prompt_cache_retention == "24h":
        return Keeping(tier="disk", ttl_s=DAY_S)
    return Keeping(tier="host", ttl_s=IN_MEMORY_S)
