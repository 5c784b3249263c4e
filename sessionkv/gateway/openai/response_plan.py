"""From a request to the turn that answers it: where it goes on, with which messages.

A conversation begins with its system prompt and its tools, so a turn may follow an earlier response
only where both are as they were there. Otherwise the whole conversation is written anew behind the
new ones, on a session that begins with it: its cache is lost at the first token all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from sessionkv.errors import (
    InvalidRequest,
    ItemNotFound,
    ResponseNotFound,
)
from sessionkv.gateway.grammars import check_calls
from sessionkv.gateway.openai.response_body import KeptResponse, SystemPart, join_system
from sessionkv.gateway.openai.response_ids import place_of, session_of
from sessionkv.gateway.openai.response_items import spaces_of, to_messages, to_tools
from sessionkv.gateway.openai.response_schema import ResponseRequest
from sessionkv.gateway.openai.response_store import ResponseStore, Standing
from sessionkv.gateway.openai.response_turn import Plan

Message = Mapping[str, Any]
Item = Mapping[str, Any]
_SYSTEM_ROLES = ("system", "developer")


async def plan_of(
    store: ResponseStore,
    body: ResponseRequest,
    echo: Mapping[str, Any],
    standing: Standing | None = None,
) -> Plan:
    """The turn that answers a request.

    Args:
        store: The caller's responses.
        body: The request, checked.
        echo: What the response repeats of it.
        standing: Where the conversation is that it goes on from, None where it names none.

    Raises:
        InvalidRequest: An item cannot be read, or there is none.
        PreviousResponseNotFound, ItemNotFound: What is referred to is not there.
    """
    items = await resolved(store, body.items)
    tools = to_tools(body.tools or ())
    check_calls(tools, store.style)
    if standing is None:
        standing = await _previous(store, body.previous_response_id)
        if standing.last is None:
            standing, items = await _recognised(store, standing, items)
    said = to_messages(items)
    if standing.last is None:
        name = store.name(str(echo["id"]), is_stored=body.is_stored)
        return _beginning(body, echo, tools, to_messages(standing.items), said, name=name)
    return await _going_on(store, body, echo, tools, standing, said)


async def _going_on(
    store: ResponseStore,
    body: ResponseRequest,
    echo: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    standing: Standing,
    said: Sequence[Message],
) -> Plan:
    before, session = standing.last, standing.session
    extra = to_messages(standing.extra)
    if before is None or session is None or not (extra or said):
        raise InvalidRequest("input", [], "at least one item behind a previous response")
    parts = _parts(body, [p for p in before.kept.system if p.role != "instructions"])
    system = join_system(parts)
    spaces = tuple(spaces_of(body.tools or ()))
    name = store.name(str(echo["id"]), is_stored=body.is_stored)
    if system == before.node.system and list(tools) == list(before.node.tools):
        kept = KeptResponse(echo, parts, num_history=len(extra), spaces=spaces)
        return Plan(name, session, system, tools, [*extra, *said], kept, body.is_stored)
    history = [*await store.history(session), *extra]
    kept = KeptResponse(echo, parts, num_history=len(history), spaces=spaces)
    return Plan(name, None, system, tools, [*history, *said], kept, body.is_stored)


def _beginning(
    body: ResponseRequest,
    echo: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    history: Sequence[Message],
    said: Sequence[Message],
    *,
    name: str,
) -> Plan:
    """System messages at the start belong to the system prompt.

    ::

        | history | said |
        | system's | turn's messages |
    """
    whole = [*history, *said]
    leading = list(takewhile(lambda message: message["role"] in _SYSTEM_ROLES, whole))
    parts = _parts(body, [SystemPart(m["role"], m["content"]) for m in leading])
    kept = KeptResponse(
        echo,
        parts,
        num_history=max(0, len(history) - len(leading)),
        num_system=max(0, len(leading) - len(history)),
        spaces=tuple(spaces_of(body.tools or ())),
    )
    rest = whole[len(leading) :]
    if not rest and (whole or body.conversation is not None):
        raise InvalidRequest("input", "no message", "a message behind those of the system")
    return Plan(name, None, join_system(parts), tools, rest, kept, body.is_stored)


def _parts(body: ResponseRequest, others: Sequence[SystemPart]) -> tuple[SystemPart, ...]:
    own = () if body.instructions is None else (SystemPart("instructions", body.instructions),)
    return (*own, *others)


async def _previous(store: ResponseStore, response_id: str | None) -> Standing:
    if response_id is None:
        return Standing(None, None, (), ())
    return Standing(session_of(response_id), await store.previous(response_id), (), ())


async def _recognised(
    store: ResponseStore, standing: Standing, items: list[Item]
) -> tuple[Standing, list[Item]]:
    """Where a client goes on that sends everything again: items of ours have our ids.

    Trusted only where all that it sends up to them is what was said; then the rest is new.
    """
    places = [place_of(str(item.get("id"))) for item in items]
    end = max((i + 1 for i, p in enumerate(places) if p is not None and p.side == "o"), default=0)
    place = places[end - 1] if end else None
    if place is None or end == len(items):
        return standing, items
    try:
        found = await store.find(place.response_id)
    except ResponseNotFound:
        return standing, items
    ids = [item["id"] for item in store.output(found)]
    if ids != [item.get("id") for item in items[end - len(ids) : end]]:
        return standing, items
    parts = [part for part in found.kept.system if part.role != "instructions"]
    system = [{"role": part.role, "content": part.text} for part in parts]
    session = session_of(found.id)
    if to_messages(items[:end]) != [*system, *await store.history(session)]:
        return standing, items
    return Standing(session, found, (), ()), items[end:]


async def resolved(store: ResponseStore, items: Sequence[Item]) -> list[Item]:
    """The items, with those that refer to stored ones replaced by them.

    Raises:
        ItemNotFound: Naming the first that is not there.
    """
    found: list[Item] = []
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
            raise ItemNotFound(str(item_id), param) from None
        items = store.output(response) if place.side == "o" else store.input_items(response)
        if place.index < len(items) and items[place.index]["id"] == item_id:
            return items[place.index]
    raise ItemNotFound(str(item_id), param)
