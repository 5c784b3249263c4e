"""Usage as Chat Completions and Completions tell it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sessionkv.client import TurnResult


def usage_map(results: Sequence[TurnResult], *, each: int, reasoning_tokens: int) -> dict[str, Any]:
    """Of all answers to one request: a prompt counts once, as its first answer found it.

    Args:
        results: The answers, in order; at least one.
        each: How many of them answer one prompt.
        reasoning_tokens: How many of the generated ones are reasoning.
    """
    firsts = results[::each]
    prompt = sum(result.usage.prompt_tokens for result in firsts)
    completion = sum(result.usage.completion_tokens for result in results)
    cached = sum(result.cache.cached_tokens for result in firsts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }
