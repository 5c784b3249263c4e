"""``/v1/responses/compact``: a conversation made shorter, as input for the next request.

What the users said stays as it is; the rest becomes one item ``compaction``, whose content is the
model's own summary of the conversation, written down in the item. Nothing of it is kept here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from sessionkv.client.options import TurnOptions
from sessionkv.errors import InvalidRequest, TurnFailed
from sessionkv.gateway.openai.response_body import echo_of, usage_of
from sessionkv.gateway.openai.response_events import output_of
from sessionkv.gateway.openai.response_ids import item_ids, new_response_id
from sessionkv.gateway.openai.response_items import (
    from_messages,
    from_tools,
    is_summary,
    summary_item,
)
from sessionkv.gateway.openai.response_plan import plan_of
from sessionkv.gateway.openai.response_schema import MAX_ITEMS, CacheOptions, Item, ResponseRequest
from sessionkv.gateway.openai.response_store import Found, ResponseStore
from sessionkv.gateway.openai.response_turn import Plan
from sessionkv.gateway.openai.sampling import priority_of
from sessionkv.gateway.openai.schema import Body, Retention, ServiceTier, Text
from sessionkv.gateway.reports import extension
from sessionkv.gateway.services import ServedModel
from sessionkv.types import FinishReason, SamplingParams

MAX_SUMMARY_TOKENS = 4096
"""And at most a quarter of the window: a summary is to leave room."""
_NO_EFFECT = "Accepted; has no effect."
_ASK = (
    "Stop here. The conversation above is about to be replaced by a summary of it, and whoever "
    "goes on will see nothing else of it but the user's own messages. Write that summary now: "
    "what the user wants, what was done and found out so far with every name, number, path and "
    "decision that will be needed, what is unfinished, and what comes next. Answer with the "
    "summary alone and call no tools."
)


class CompactRequest(Body):
    """Body of a request for a shorter conversation."""

    model: Text = Field(description="Name of the served model.")
    input: str | Annotated[list[Item], Field(max_length=MAX_ITEMS - 1)] | None = Field(
        None, description="Text of a user, or items."
    )
    instructions: str | None = Field(
        None, description="System prompt; that of the previous response where there is none."
    )
    previous_response_id: str | None = Field(
        None, description="What was said up to that response comes before the input."
    )
    service_tier: ServiceTier | None = Field(
        None, description="`priority` goes before others, `flex` behind them."
    )
    prompt_cache_key: str | None = Field(None, description=_NO_EFFECT)
    prompt_cache_retention: Retention | None = Field(None, description=_NO_EFFECT)
    prompt_cache_options: CacheOptions | None = Field(None, description=_NO_EFFECT)


async def compacted(
    body: CompactRequest, store: ResponseStore, served: ServedModel
) -> dict[str, Any]:
    """The object ``response.compaction``.

    Args:
        body: The request.
        store: The caller's responses.
        served: The model.

    Raises:
        InvalidRequest: An item cannot be read, or there is none.
        PreviousResponseNotFound, ItemNotFound: What is referred to is not there.
        TurnFailed: The model wrote no summary.
    """
    if not body.input and body.previous_response_id is None:
        raise InvalidRequest("input", body.input, "what is to be made shorter")
    request = await _request(body, store)
    request.check()
    compaction_id = new_response_id()
    plan = await plan_of(store, request, echo_of(request, compaction_id, model=served.id, tier=""))
    most = max(1, min(MAX_SUMMARY_TOKENS, served.max_model_len // 4))
    options = TurnOptions(
        sampling=SamplingParams(max_tokens=most, fit_window=True), priority=priority_of(request)
    )
    said = await _users(store, plan)
    parser = store.parser(compaction_id, calls=False)
    result = await store.whole(plan, options)
    pieces = [*parser.feed(result.text), *parser.end()]
    is_cut = result.finish_reason is FinishReason.LENGTH
    summary = output_of(compaction_id, pieces, is_cut=is_cut)
    text = "".join(
        part["text"] for item in summary if item["type"] == "message" for part in item["content"]
    ).strip()
    if not text:
        raise TurnFailed("the model wrote no summary")
    new_id = item_ids(compaction_id, "o")
    items = from_messages(said, new_id)
    counts = {
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.completion_tokens,
        "cached_tokens": result.cache.cached_tokens,
    }
    report = extension([result])
    report.pop("node", None)
    return {
        "id": compaction_id,
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*items, summary_item(new_id("compaction", len(items)), text)],
        "usage": usage_of(counts, summary),
        "sessionkv": report,
    }


async def _request(body: CompactRequest, store: ResponseStore) -> ResponseRequest:
    """The request for the summary: behind tools and instructions as they were, for their cache."""
    last = {"type": "message", "role": "user", "content": _ASK}
    given = body.input
    items = [{**last, "content": given}] if isinstance(given, str) else list(given or ())
    before: Found | None = None
    if body.previous_response_id is not None:
        before = await store.previous(body.previous_response_id)
    instructions = body.instructions
    if instructions is None and before is not None:
        instructions = before.kept.instructions
    asked = {
        "model": body.model,
        "input": [*items, last],
        "instructions": instructions,
        "previous_response_id": body.previous_response_id,
        "tools": [] if before is None else from_tools(before.node.tools),
        "tool_choice": "none",
        "store": False,
        "service_tier": body.service_tier,
    }
    return ResponseRequest.model_validate(asked)


async def _users(store: ResponseStore, plan: Plan) -> Sequence[Mapping[str, Any]]:
    """What the users said before the question; earlier summaries are in the new one."""
    history = [] if plan.base is None else await store.history(plan.base)
    before = [*history, *plan.messages][:-1]
    return [m for m in before if m["role"] == "user" and not is_summary(m)]
