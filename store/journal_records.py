"""How the journal's rows are laid out: checksum, version, fields; and the keys they lie under.

``docs/store-format.md`` has the layout. A row that does not match its checksum, has another version
or lies under another key than its fields give reads as None. Must not know of databases.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import msgpack
import xxhash

from sessionkv.types import HeadRecord, KeyRecord, NodeRecord

RECORD_VERSION = 1
CHECKSUM_BYTES = 8
NAME_KEY_BYTES = 32
NAME_BYTES = 400
"""Of a longer name only so much is in its row of ``names``: keys of LMDB end at 511 bytes."""

_KINDS = ("root", "chat", "raw")
_U64 = struct.Struct(">Q")
_STAMP = struct.Struct(">d")
_PLACE = struct.Struct(">QIIIQB")
_TENANT_BYTES = 16
_FIELDS: Mapping[type[Any], tuple[str, ...]] = {
    kind: tuple(item.name for item in fields(kind)) for kind in (NodeRecord, HeadRecord, KeyRecord)
}

Record = TypeVar("Record", NodeRecord, HeadRecord, KeyRecord)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node stands in the tree and what keeps it there; the only row that changes.

    Attributes:
        parent_id: 0 for a root.
        heads: Heads on it.
        children: Nodes whose parent it is.
        num_turns: From the root to it.
        num_tokens: Of the log up to its end.
    """

    parent_id: int
    heads: int
    children: int
    num_turns: int
    num_tokens: int
    kind: str

    def counted(self, *, heads: int = 0, children: int = 0) -> Place:
        """The same with so many more; counts do not fall below 0."""
        return replace(
            self, heads=max(0, self.heads + heads), children=max(0, self.children + children)
        )


def node_key(node_id: int) -> bytes:
    """Database key of a node: ids ascend."""
    return _U64.pack(node_id)


def node_id_of(key: bytes) -> int:
    """The way back from :func:`node_key`."""
    return int(_U64.unpack(key)[0])


def name_key(tenant: str, name: str) -> bytes:
    """Database key of a head or an idempotency key: fixed length, whatever the name.

    sha256 of both strings in UTF-8, each after its length as u32 big-endian.
    """
    digest = hashlib.sha256()
    # A name to be looked for may be any text; stored ones have no lone surrogates.
    for part in (tenant.encode(), name.encode("utf-8", "surrogatepass")):
        digest.update(struct.pack(">I", len(part)) + part)
    return digest.digest()


def order_key(tenant: str, name: str, *, unnamed: bool) -> bytes:
    """Key in ``names``: a tenant's names in order, those that the tree made after the others."""
    return (
        tenant_key(tenant) + bytes([unnamed]) + name.encode("utf-8", "surrogatepass")[:NAME_BYTES]
    )


def tenant_part(key: bytes) -> bytes:
    """What all of :func:`order_key` begin with that are listed together."""
    return key[: _TENANT_BYTES + 1]


def tenant_key(tenant: str) -> bytes:
    """Key of a tenant, and what its rows of the indexes begin with."""
    return hashlib.sha256(tenant.encode()).digest()[:_TENANT_BYTES]


def stamp_key(tenant: str, stamp_s: float, name: bytes) -> bytes:
    """Key of an index by time: a tenant's rows, oldest first."""
    return tenant_key(tenant) + _STAMP.pack(max(0.0, stamp_s)) + name


def owner_of(key: bytes) -> bytes:
    """The tenant's key in a :func:`stamp_key`."""
    return key[:_TENANT_BYTES]


def stamp_of(key: bytes) -> float:
    """The time in a :func:`stamp_key`."""
    return float(_STAMP.unpack_from(key, _TENANT_BYTES)[0])


def name_of(key: bytes) -> bytes:
    """The name key in a :func:`stamp_key`."""
    return key[_TENANT_BYTES + _STAMP.size :]


def behind(owner: bytes) -> bytes:
    """A key behind all of a tenant's rows, and before those of the next."""
    return owner + b"\xff" * (_STAMP.size + NAME_KEY_BYTES)


def key_of(record: NodeRecord | HeadRecord | KeyRecord) -> bytes:
    """Where a record must lie."""
    match record:
        case NodeRecord():
            return node_key(record.node_id)
        case HeadRecord():
            return name_key(record.tenant, record.name)
        case KeyRecord():
            return name_key(record.tenant, record.key)


def pack(record: NodeRecord | HeadRecord | KeyRecord) -> bytes:
    """Row of a record."""
    return sealed([getattr(record, name) for name in _FIELDS[type(record)]])


def unpack(key: bytes, value: bytes, kind: type[Record]) -> Record | None:
    """Record of a row; None where it is damaged or lies under another's key."""
    values = checked(value)
    if values is None or len(values) != len(_FIELDS[kind]):
        return None
    record = kind(*values)
    return record if key_of(record) == key else None


def pack_place(node_id: int, place: Place) -> bytes:
    """Row of a place; its checksum covers the node's id too."""
    body = _PLACE.pack(
        place.parent_id,
        place.heads,
        place.children,
        place.num_turns,
        place.num_tokens,
        _KINDS.index(place.kind),
    )
    return xxhash.xxh3_64_digest(node_key(node_id) + body) + body


def unpack_place(node_id: int, value: bytes) -> Place | None:
    """Place of a row, None where it is damaged."""
    body = value[CHECKSUM_BYTES:]
    if len(body) != _PLACE.size:
        return None
    if xxhash.xxh3_64_digest(node_key(node_id) + body) != value[:CHECKSUM_BYTES]:
        return None
    parent_id, heads, children, num_turns, num_tokens, kind = _PLACE.unpack(body)
    return Place(parent_id, heads, children, num_turns, num_tokens, _KINDS[kind])


def sealed(values: list[Any]) -> bytes:
    """Version and values in msgpack, after their checksum."""
    body: bytes = msgpack.packb([RECORD_VERSION, *values])
    return xxhash.xxh3_64_digest(body) + body


def checked(value: bytes) -> list[Any] | None:
    """The values of :func:`sealed`, or None when they are damaged or of another version."""
    body = value[CHECKSUM_BYTES:]
    if xxhash.xxh3_64_digest(body) != value[:CHECKSUM_BYTES]:
        return None
    version, *values = msgpack.unpackb(body)
    return values if version == RECORD_VERSION else None
