"""What calls find in the journal, made readable: opaque bytes become messages and plain values.

Bytes that cannot be read, or hold what no reply can carry, cost the call that asked and no more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sessionkv.cache.turns import format_node_id
from sessionkv.errors import InvalidRequest, SessionDamaged
from sessionkv.ipc.codec import encode_reply
from sessionkv.ipc.messages import Result
from sessionkv.text.messages import Message
from sessionkv.text.stored import plain_map, read_messages, read_reply, read_root, reading
from sessionkv.types import NodeRecord

_BESIDE = ("metadata", "usage")
"""What a node's map of text may hold for clients alone."""


def readable(value: Any) -> Any:
    """A call's value with what it has of turns as messages.

    Raises:
        SessionDamaged: A turn cannot be read.
    """
    if isinstance(value, Mapping) and "nodes" in value:
        rest = {k: v for k, v in value.items() if k != "nodes"}
        found = _history(value["nodes"])
        return rest | {
            "messages": [message.to_map() for _, message in found],
            "message_nodes": [format_node_id(node_id) for node_id, _ in found],
        }
    if isinstance(value, Mapping) and "root" in value:
        return _with_root(value)
    return value


def check_beside(record: NodeRecord) -> None:
    """See that what a turn from elsewhere holds for clients alone can be read later.

    Raises:
        InvalidRequest: Naming the turn and what of it cannot be read.
    """
    blob = record.incoming_blob if record.kind == "root" else record.reply_blob
    try:
        _beside(record.node_id, blob)
    except SessionDamaged as error:
        raise InvalidRequest("nodes", error.message, "turns that can be read") from None


def _history(nodes: Any) -> list[tuple[int, Message]]:
    """Messages in order, each with its turn."""
    found: list[tuple[int, Message]] = []
    for node_id, kind, incoming, reply in nodes:
        if kind == "root":
            system, _ = read_root(node_id, incoming)
            messages = [] if system is None else [Message("system", system)]
        else:
            messages = [*read_messages(node_id, incoming), read_reply(node_id, reply)]
        found += [(node_id, message) for message in messages]
    return found


def _with_root(value: Mapping[str, Any]) -> dict[str, Any]:
    """One turn, or the path up to it, with what it all begins with."""
    system, tools_json = read_root(*value["root"])
    begun = {"system": system, "tools": json.loads(tools_json) if tools_json else []}
    if "path" in value:
        return begun | {"path": [_turn(turn) for turn in value["path"]]}
    return begun | _turn(value)


def _turn(value: Mapping[str, Any]) -> dict[str, Any]:
    node_id, incoming, reply = value["stored"]
    shown = {k: v for k, v in value.items() if k not in ("stored", "root")}
    if value["kind"] == "root":
        return shown | {"messages": [], "reply": None} | _beside(node_id, incoming)
    messages = [message.to_map() for message in read_messages(node_id, incoming)]
    said = read_reply(node_id, reply).to_map()
    return shown | {"messages": messages, "reply": said} | _beside(node_id, reply)


def _beside(node_id: int, blob: bytes) -> dict[str, Any]:
    with reading(f"the metadata of turn {node_id}"):
        said = plain_map(blob)
        values = {name: said[name] for name in _BESIDE if said.get(name) is not None}
        for name, found in values.items():
            if not isinstance(found, dict):
                raise InvalidRequest(name, type(found).__name__, "a map")
        encode_reply(Result(id=0, value=values))  # JSON may hold what no reply can carry
        return values
