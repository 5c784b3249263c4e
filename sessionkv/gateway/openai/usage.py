"""Usage as Chat Completions and Completions tell it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sessionkv.client import TurnResult


def usage_map(results: Sequence[TurnResult], *, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Of all answers to one request: the prompt counts once, as its first answer found it.

    Args:
        results: The answers, in order; at least one.
        reasoning_tokens: How many of the generated ones are reasoning.
    """
    prompt = results[0].usage.prompt_tokens
    completion = sum(result.usage.completion_tokens for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": results[0].cache.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }
