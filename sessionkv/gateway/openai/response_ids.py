"""Names of the Responses API: of responses, of the sessions that hold them, of items, of calls.

A response's id is made before its turn begins, since a stream's first event tells it. Its items
are named by it and their place, so the same turn gives the same items whenever it is read, and an
item's id says where to look for it.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

PASSING = "~http:passing:"
"""Begins the names of sessions of responses that are not stored."""
BEGUN = "~http:begun:"
"""Begins the names of sessions that note responses which are made in the background."""
ENDED = "~http:ended:"
"""Of those that failed or were cancelled."""
Side = Literal["i", "o"]
"""Whether an item came in or was given out."""

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "compaction": "cmp",
}
_RESPONSE = re.compile(r"resp_[0-9a-f]{32}", re.ASCII)
_CONVERSATION = re.compile(r"conv_[0-9a-f]{32}", re.ASCII)
_ITEM = re.compile(r"(?:msg|rs|fc|fco)_([0-9a-f]{32})_([io])([0-9]{1,6})", re.ASCII)
_CALL_CHARS = string.ascii_letters + string.digits
_CALL_ID_CHARS = 9  # templates of Mistral models take no other length


def new_response_id() -> str:
    """One that nobody can guess."""
    return f"resp_{secrets.token_hex(16)}"


def new_conversation_id() -> str:
    """One that nobody can guess."""
    return f"conv_{secrets.token_hex(16)}"


def is_response_id(text: str) -> bool:
    """Whether it may name a response."""
    return _RESPONSE.fullmatch(text) is not None


def is_conversation_id(text: str) -> bool:
    """Whether it may name a conversation."""
    return _CONVERSATION.fullmatch(text) is not None


def session_of(response_id: str) -> str:
    """The session that holds a response; its name says that it runs out by itself."""
    return f"~http:{response_id}"


def passing_session_of(response_id: str, run: str) -> str:
    """The session of a response that is not stored, while its turn runs.

    Args:
        response_id: The response.
        run: Names this run of the gateway: what another one left can be told from what runs.
    """
    return f"{PASSING}{run}:{response_id}"


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """Where an item is: in which response, whether it came in or was given out, and its number."""

    response_id: str
    side: Side
    index: int


def place_of(item_id: str) -> ItemPlace | None:
    """Where an item of that id is; None where it names none."""
    found = _ITEM.fullmatch(item_id)
    if found is None:
        return None
    return ItemPlace(f"resp_{found[1]}", "i" if found[2] == "i" else "o", int(found[3]))


def item_ids(owner_id: str, side: Side) -> Callable[[str, int], str]:
    """Makes the id of an item from its type and its place among those of a response."""
    owner = owner_id.partition("_")[2]
    return lambda kind, index: f"{_PREFIXES[kind]}_{owner}_{side}{index}"


def call_ids(response_id: str) -> Callable[[], str]:
    """Makes the ids of a response's calls, one after the other; the same ones each time."""
    ids = _call_ids(response_id)
    return lambda: next(ids)


def _call_ids(response_id: str) -> Iterator[str]:
    number = 0
    while True:
        value = int.from_bytes(hashlib.sha256(f"{response_id}.{number}".encode()).digest())
        chars = ""
        for _ in range(_CALL_ID_CHARS):
            value, place = divmod(value, len(_CALL_CHARS))
            chars += _CALL_CHARS[place]
        yield chars
        number += 1
