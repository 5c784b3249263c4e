"""Usage as the Messages API tells it: three counts of prompt tokens, which sum up exactly."""

from __future__ import annotations

from typing import Any


def usage_map(
    *, prompt_tokens: int, cached_tokens: int, output_tokens: int, ttl: str | None
) -> dict[str, Any]:
    """Of one answer.

    Args:
        prompt_tokens: Of the whole prompt.
        cached_tokens: Found in the cache, in whichever tier.
        output_tokens: Sampled so far.
        ttl: The longest time that a breakpoint asks for: what was computed is then what the cache
            gained. None without a breakpoint.
    """
    computed = prompt_tokens - cached_tokens
    created = 0 if ttl is None else computed
    return {
        "input_tokens": computed - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached_tokens,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created if ttl == "5m" else 0,
            "ephemeral_1h_input_tokens": created if ttl == "1h" else 0,
        },
        "output_tokens": output_tokens,
        "service_tier": "standard",
    }
