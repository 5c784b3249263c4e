"""From a request to the turn that answers it: where it goes on, with which messages.

A conversation begins with its system prompt and its tools, so a turn may follow an earlier response
only where both are as they were there. Otherwise the whole conversation is written anew behind the
new ones, on a session that begins with it: its cache is lost at the first token all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from sessionkv.errors import InvalidRequest
from sessionkv.gateway.errors import refused
from sessionkv.gateway.openai.response_body import Kept, SystemPart, join_system
from sessionkv.gateway.openai.response_errors import (
    ItemNotFound,
    PreviousResponseNotFound,
    ResponseNotFound,
)
from sessionkv.gateway.openai.response_ids import place_of, session_of
from sessionkv.gateway.openai.response_items import to_messages, to_tools
from sessionkv.gateway.openai.response_schema import ResponseRequest
from sessionkv.gateway.openai.response_store import Found, Plan, ResponseStore

_SYSTEM_ROLES = ("system", "developer")


async def plan_of(store: ResponseStore, body: ResponseRequest, echo: Mapping[str, Any]) -> Plan:
    """The turn that answers a request.

    Args:
        store: The caller's responses.
        body: The request, checked.
        echo: What the response repeats of it.

    Raises:
        InvalidRequest: An item cannot be read, or there is none.
        PreviousResponseNotFound, ItemNotFound: What is referred to is not there.
    """
    messages = to_messages(await resolved(store, body.items))
    tools = to_tools(body.tools or ())
    if tools and not store.reads_calls:
        raise refused("tools", len(tools), "the model's template has no tool calls")
    before = await _previous(store, body.previous_response_id)
    if before is None:
        return _beginning(body, echo, tools, messages)
    if not messages:
        raise InvalidRequest("input", [], "at least one item behind a previous response")
    parts = _parts(body, [p for p in before.kept.system if p.role != "instructions"])
    kept, system = Kept(echo, parts), join_system(parts)
    name, base = session_of(str(echo["id"])), session_of(before.id)
    if system == before.node.system and list(tools) == list(before.node.tools):
        return Plan(name, base, system, tools, messages, kept, body.is_stored)
    history = await store.history(base)
    kept = Kept(echo, parts, num_history=len(history))
    return Plan(name, None, system, tools, [*history, *messages], kept, body.is_stored)


def _beginning(
    body: ResponseRequest,
    echo: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    messages: Sequence[Mapping[str, Any]],
) -> Plan:
    leading = list(takewhile(lambda message: message["role"] in _SYSTEM_ROLES, messages))
    parts = _parts(body, [SystemPart(m["role"], m["content"]) for m in leading])
    kept = Kept(echo, parts, num_system=len(leading))
    name = session_of(str(echo["id"]))
    said = messages[len(leading) :]
    return Plan(name, None, join_system(parts), tools, said, kept, body.is_stored)


def _parts(body: ResponseRequest, others: Sequence[SystemPart]) -> tuple[SystemPart, ...]:
    own = () if body.instructions is None else (SystemPart("instructions", body.instructions),)
    return (*own, *others)


async def _previous(store: ResponseStore, response_id: str | None) -> Found | None:
    if response_id is None:
        return None
    try:
        return await store.find(response_id)
    except ResponseNotFound:
        raise PreviousResponseNotFound.of(response_id) from None


async def resolved(
    store: ResponseStore, items: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The items, with those that refer to stored ones replaced by them.

    Raises:
        ItemNotFound: Naming the first that is not there.
    """
    found: list[Mapping[str, Any]] = []
    for index, item in enumerate(items):
        is_reference = item.get("type") == "item_reference" or set(item) == {"id"}
        param = f"input[{index}].id"
        found.append(await referred(store, item.get("id"), param) if is_reference else item)
    return found


async def referred(
    store: ResponseStore, item_id: object, param: str | None = None
) -> Mapping[str, Any]:
    """The item of an id.

    Raises:
        ItemNotFound: There is none.
    """
    place = place_of(item_id) if isinstance(item_id, str) else None
    if place is not None:
        try:
            response = await store.find(place.response_id)
        except ResponseNotFound:
            raise ItemNotFound.of(str(item_id), param) from None
        items = store.output(response) if place.side == "o" else store.input_items(response)
        if place.index < len(items) and items[place.index]["id"] == item_id:
            return items[place.index]
    raise ItemNotFound.of(str(item_id), param)
