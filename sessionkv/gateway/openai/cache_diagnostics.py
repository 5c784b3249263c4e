"""Why a response did not find the cache of another one: OpenAI's ``prompt_cache_diagnostics``."""

from __future__ import annotations

from typing import Any

from sessionkv.client import TurnResult
from sessionkv.errors import ResponseNotFound
from sessionkv.gateway.openai.response_ids import session_of
from sessionkv.gateway.openai.response_store import Found, ResponseStore
from sessionkv.gateway.openai.response_turn import Plan
from sessionkv.types import MissReason

_WHOLE = (MissReason.NONE, MissReason.FIRST_TURN)


async def compared_to(store: ResponseStore, response_id: str) -> Found | None:
    """The response that is compared to; None where it is not there. Before the turn."""
    try:
        return await store.find(response_id)
    except ResponseNotFound:
        return None


def diagnosis(other: Found | None, plan: Plan, result: TurnResult) -> dict[str, Any]:
    """What became of the cache of another response.

    Args:
        other: From :func:`compared_to`.
        plan: The turn that was run.
        result: What came of it.
    """
    if other is None:
        return {"type": "comparison_response_not_found"}
    cached, prompt = result.cache.cached_tokens, result.usage.prompt_tokens
    if list(other.node.tools) != list(plan.tools):
        reason = "tools_changed"
    elif plan.base == session_of(other.id):
        # It goes on from it: what was computed again was lost, and for that there is no word.
        is_whole = result.cache.miss.reason in _WHOLE
        return {"type": "cache_hit" if is_whole else "unavailable"}
    elif cached and cached >= min(prompt - 1, other.node.usage.get("prompt_tokens", prompt)):
        return {"type": "cache_hit"}
    else:
        reason = "input_changed"
    return {
        "type": "cache_miss",
        "reason": reason,
        "cache_missed_tokens": prompt - cached,
        "comparison_reusable_tokens": cached,
    }
