"""What the journal keeps of a turn as opaque bytes, read back: the one way to read any of it.

Whatever is wrong with the bytes (no UTF-8, no JSON, another shape, nested past all sense, text that
cannot be sent) is one error, :class:`SessionDamaged`, that names the turn. So bytes that are stored
or imported can cost the call that needs them, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sessionkv.errors import InvalidRequest, SessionDamaged, SessionKVError
from sessionkv.text.messages import (
    Message,
    check_stored_tools,
    check_system,
    load_messages,
    user_message,
)
from sessionkv.types import NodeRecord

_MALFORMED = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""All that decoding bytes and looking into the value can raise, besides this package's errors."""


def read_messages(node_id: int, blob: bytes) -> tuple[Message, ...]:
    """What came in with a turn; none where nothing is kept, as of raw turns.

    Raises:
        SessionDamaged: They cannot be read.
    """
    if not blob:
        return ()
    with reading(f"the messages of turn {node_id}"):
        return load_messages(blob)


def read_reply(node_id: int, blob: bytes) -> Message:
    """A turn's reply as the client saw it.

    Raises:
        SessionDamaged: It cannot be read.
    """
    with reading(f"the reply of turn {node_id}"):
        content = plain_map(blob)["content"]
        return replace(user_message(content, field="content"), role="assistant")


def read_root(node_id: int, blob: bytes) -> tuple[str | None, str | None]:
    """System prompt, and tools as JSON text, of a root.

    Raises:
        SessionDamaged: They cannot be read.
    """
    with reading(f"the system prompt and tools of turn {node_id}"):
        said = plain_map(blob)
        return check_system(said.get("system")), check_stored_tools(said.get("tools"))


def check_blobs(record: NodeRecord) -> None:
    """See that every blob of a turn from elsewhere can be read later. O(its bytes).

    Raises:
        InvalidRequest: Naming the turn and what of it cannot be read.
    """
    node_id = record.node_id
    try:
        if record.kind == "root":
            read_root(node_id, record.incoming_blob)
            return  # its other blobs are core's: any bytes will do
        read_messages(node_id, record.incoming_blob)
        read_reply(node_id, record.reply_blob)
        with reading(f"the sampling parameters of turn {node_id}"):
            plain_map(record.sampling_blob)
    except SessionDamaged as error:
        raise InvalidRequest("nodes", error.message, "turns that can be read") from None


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Around the decoding of stored bytes: whatever is wrong with them becomes one error.

    Raises:
        SessionDamaged: Naming ``what`` and the reason.
    """
    try:
        yield
    except SessionKVError as error:
        raise SessionDamaged(f"{what} cannot be read: {error.message}") from None
    except _MALFORMED as failure:
        raise SessionDamaged(f"{what} cannot be read ({type(failure).__name__})") from None


def plain_map(blob: bytes) -> Mapping[str, Any]:
    """A blob's map; of an empty one an empty map.

    Raises:
        InvalidRequest: It holds something else.
        ValueError: It is no JSON.
    """
    value = json.loads(blob) if blob else {}
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidRequest("value", type(value).__name__, "a map")
    return value
