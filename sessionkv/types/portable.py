"""Turns and sessions as plain maps: what goes over the wire and into a file when they move house.

Keys are the field names of the records. Unknown keys are ignored, so that later versions may say
more. What comes back is checked field by field, and the blobs stay opaque.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from sessionkv.errors import InvalidRequest
from sessionkv.types.blocks import BlockHash
from sessionkv.types.records import HeadRecord, NodeRecord
from sessionkv.types.tokens import TOKEN_BYTES
from sessionkv.types.utf8 import utf8_bytes

LOCAL_TENANT = "local"
"""Whose everything is on a socket without keys."""
KINDS = ("root", "chat", "raw")
HISTORIES = ("keep", "follow")
_MAX_ID = 2**63 - 1
_MAX_COUNT = 2**31 - 1
_MAX_DIGEST_BYTES = 128
_HASH_BYTES = 32

_Check = Callable[[str, Any], Any]
_NODE_NAMES = tuple(item.name for item in fields(NodeRecord))
_SESSION_NAMES = ("name", "node_id", "history", "created_s", "updated_s")


@dataclass(frozen=True, slots=True)
class PortableSession:
    """A session without what belongs to one engine: tenant and pin.

    Attributes:
        node_id: Its last turn, among the nodes it travels with.
    """

    name: str
    node_id: int
    history: str
    created_s: float
    updated_s: float

    @classmethod
    def of(cls, head: HeadRecord) -> PortableSession:
        """What of a head may travel."""
        return cls(head.name, head.node_id, head.history, head.created_s, head.updated_s)

    def to_head(self, tenant: str, node_id: int) -> HeadRecord:
        """A head on ``node_id`` that was never pinned."""
        return HeadRecord(
            tenant=tenant,
            name=self.name,
            node_id=node_id,
            pin_tier="",
            pin_expires_s=None,
            pin_priority=0,
            history=self.history,
            created_s=self.created_s,
            updated_s=self.updated_s,
        )


def node_to_map(record: NodeRecord) -> dict[str, Any]:
    """Every field by its name."""
    return {name: getattr(record, name) for name in _NODE_NAMES}


def node_from_map(values: object, *, field: str = "node") -> NodeRecord:
    """The way back, checked.

    Raises:
        InvalidRequest: Naming the field, its value and what is allowed.
    """
    record = NodeRecord(**_read(values, field, _NODE_CHECKS))
    num_tokens = len(record.token_ids) // TOKEN_BYTES
    if (record.kind == "root") != (record.parent_id is None):
        _refuse(f"{field}.kind", record.kind, "root for a turn without parent, and only for that")
    if record.parent_id is not None and record.parent_id >= record.node_id:
        _refuse(f"{field}.parent_id", record.parent_id, "less than node_id")
    if record.num_incoming_tokens > num_tokens:
        _refuse(f"{field}.num_incoming_tokens", record.num_incoming_tokens, f"0 to {num_tokens}")
    return record


def session_to_map(session: PortableSession) -> dict[str, Any]:
    """Every field by its name."""
    return {name: getattr(session, name) for name in _SESSION_NAMES}


def session_from_map(values: object, *, field: str = "session") -> PortableSession:
    """The way back, checked but for the name's length.

    Raises:
        InvalidRequest: Naming the field, its value and what is allowed.
    """
    return PortableSession(**_read(values, field, _SESSION_CHECKS))


def _read(values: object, field: str, checks: Mapping[str, _Check]) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        _refuse(field, values, "a map")
    return {name: check(f"{field}.{name}", values.get(name)) for name, check in checks.items()}


def _refuse(name: str, value: object, allowed: str) -> NoReturn:
    raise InvalidRequest(name, value, allowed)


def _integer(low: int, high: int, *, optional: bool = False) -> _Check:
    def check(name: str, value: Any) -> int | None:
        if value is None and optional:
            return None
        if type(value) is not int or not low <= value <= high:
            _refuse(name, value, f"an integer from {low} to {high}")
        return int(value)

    return check


def _text(most: int) -> _Check:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or utf8_bytes(name, value) > most:
            _refuse(name, value, f"text of at most {most} bytes")
        return value

    return check


def _one_of(*words: str) -> _Check:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            _refuse(name, value, f"one of {', '.join(words)}")
        return value

    return check


def _blob(name: str, value: Any) -> bytes:
    if not isinstance(value, bytes):
        _refuse(name, value, "bytes")
    return value


def _tokens(name: str, value: Any) -> bytes:
    if not isinstance(value, bytes) or len(value) % TOKEN_BYTES:
        _refuse(name, type(value).__name__, f"bytes, {TOKEN_BYTES} for each token")
    return value


def _chain_hash(name: str, value: Any) -> BlockHash:
    if not isinstance(value, bytes) or len(value) not in (0, _HASH_BYTES):
        _refuse(name, value, f"{_HASH_BYTES} bytes, or none")
    return BlockHash(value)


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        _refuse(name, value, "true or false")
    return value


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        _refuse(name, value, "seconds")
    return float(value)


_NODE_CHECKS: Mapping[str, _Check] = {
    "node_id": _integer(1, _MAX_ID),
    "parent_id": _integer(1, _MAX_ID, optional=True),
    "kind": _one_of(*KINDS),
    "token_ids": _tokens,
    "num_incoming_tokens": _integer(0, _MAX_COUNT),
    "num_messages": _integer(0, _MAX_COUNT),
    "incoming_blob": _blob,
    "reply_blob": _blob,
    "finish_reason": _text(_MAX_DIGEST_BYTES),
    "closed": _boolean,
    "sampling_blob": _blob,
    "tokenizer_digest": _text(_MAX_DIGEST_BYTES),
    "template_digest": _text(_MAX_DIGEST_BYTES),
    "chain_hash": _chain_hash,
    "created_s": _seconds,
    "num_unwritten_tokens": _integer(0, _MAX_COUNT),
}
_SESSION_CHECKS: Mapping[str, _Check] = {
    "name": _text(_MAX_COUNT),
    "node_id": _integer(1, _MAX_ID),
    "history": _one_of(*HISTORIES),
    "created_s": _seconds,
    "updated_s": _seconds,
}
