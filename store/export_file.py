"""The file that sessions are exported to: records in a row, each under a checksum.

    0   8  magic "SKVEXPRT"      16  records: type (4 bytes, ASCII), length of the body (u32),
    8   2  version, 1                checksum (8 bytes), body
    10  6  zero                  at the end a record END, and nothing after it

Integers are unsigned little-endian. A record's checksum is xxh3-64 (canonical big-endian) over the
checksum before it, its type and length, and its body; before the first stands that of the file's
first 16 bytes. So a record that was changed, dropped, doubled or moved breaks the row there.

Invariants: what the reader hands out matched its checksum and fits what came before; a reader that
came to its end has seen the whole file as it was written. ``docs/export-format.md`` has the bodies.
Must not know of stores, engines or what blobs mean.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

import msgpack
import xxhash

from sessionkv.errors import ExportDamaged, InvalidRequest
from sessionkv.types import (
    BlockHash,
    BlockRecord,
    KVGeometry,
    NodeRecord,
    pack_tokens,
    unpack_tokens,
)
from sessionkv.types.portable import (
    PortableSession,
    node_from_map,
    node_to_map,
    session_from_map,
    session_to_map,
)
from sessionkv.types.portable_tree import TreeShape

MAGIC = b"SKVEXPRT"
VERSION = 1
_FILE_HEAD = struct.Struct("<8sH6x")
_RECORD_HEAD = struct.Struct("<4sI8s")
_BLOCK_HEAD = struct.Struct("<32s32sI")
_COUNTS = struct.Struct("<QQQ")
_NODE, _SESSION, _KV, _BLOCK, _END = b"NODE", b"SESS", b"KVID", b"BLCK", b"END "
_SHAPE = ("num_layers", "num_kv_heads", "head_dim", "block_size", "element_bytes")
MAX_BODY_BYTES = 2**30
"""No record is larger: neither a turn nor a block comes near."""


@dataclass(frozen=True, slots=True)
class KVSection:
    """The blocks that follow are of this KV identity and shape."""

    identity: bytes
    geometry: KVGeometry


@dataclass(frozen=True, slots=True)
class ExportedBlock:
    """One KV block; ``payload`` is ``geometry.block_bytes`` long."""

    record: BlockRecord
    payload: memoryview


@dataclass(frozen=True, slots=True)
class ExportCounts:
    """How much is in a file. Nodes are turns, and the roots of sessions."""

    nodes: int = 0
    sessions: int = 0
    blocks: int = 0


ExportItem = NodeRecord | PortableSession | KVSection | ExportedBlock


class ExportWriter:
    """Writes one file, front to back.

    Order: for each tree of turns its nodes, parents first, and their sessions; then KV sections
    with their blocks. :meth:`finish` makes it a whole file.

    Attributes:
        num_turns: Nodes so far that are no roots.
    """

    def __init__(self, file: BinaryIO) -> None:
        """Begin ``file``, which stays the caller's."""
        self._file = file
        head = _FILE_HEAD.pack(MAGIC, VERSION)
        file.write(head)
        self._before = xxhash.xxh3_64_digest(head)
        self.num_turns = self._nodes = self._sessions = self._blocks = 0

    def add(self, item: ExportItem) -> None:
        """Write one item.

        Raises:
            OSError: As the file's.
        """
        if isinstance(item, NodeRecord):
            self._nodes += 1
            self.num_turns += item.parent_id is not None
            self._put(_NODE, msgpack.packb(node_to_map(item)))
        elif isinstance(item, PortableSession):
            self._sessions += 1
            self._put(_SESSION, msgpack.packb(session_to_map(item)))
        elif isinstance(item, KVSection):
            geometry = asdict(item.geometry)
            self._put(_KV, msgpack.packb({"identity": item.identity, "geometry": geometry}))
        else:
            self._blocks += 1
            record = item.record
            head = _BLOCK_HEAD.pack(record.key, record.parent, record.fill)
            self._put(_BLOCK, head, pack_tokens(record.token_ids), item.payload)

    def finish(self) -> ExportCounts:
        """Write the end; what the file holds."""
        self._put(_END, _COUNTS.pack(self._nodes, self._sessions, self._blocks))
        return ExportCounts(self._nodes, self._sessions, self._blocks)

    def _put(self, kind: bytes, *parts: bytes | memoryview) -> None:
        length = sum(len(part) for part in parts)
        self._before = _checksum(self._before, kind, length, parts)
        self._file.write(_RECORD_HEAD.pack(kind, length, self._before))
        for part in parts:
            self._file.write(part)


class ExportReader:
    """Reads one file from its start; iterate to its end to have it checked.

    Attributes:
        counts: What has been read so far.
        offset: Position after the last item.
    """

    def __init__(self, file: BinaryIO) -> None:
        """Begin ``file``, which can be sought and stays the caller's.

        Raises:
            ExportDamaged: It is not an export of sessions, or of a newer format.
        """
        self._file = file
        self._size = file.seek(0, 2)
        file.seek(0)
        head = file.read(_FILE_HEAD.size)
        self._before = xxhash.xxh3_64_digest(head)
        self.offset = 0
        self.counts = ExportCounts()
        self._shape = TreeShape()
        self._node_ids: set[int] = set()
        self._kv: KVSection | None = None
        if head[:8] != MAGIC:
            raise ExportDamaged("this is not a file of exported sessions", 0)
        if len(head) < _FILE_HEAD.size:
            raise ExportDamaged("the file ends here", len(head))
        version = int.from_bytes(head[8:10], "little")
        if version != VERSION:
            raise ExportDamaged(f"format {version}, and this version reads {VERSION}", 8)
        if any(head[10:]):
            raise ExportDamaged("bytes that are zero in this format are not", 10)
        self.offset = len(head)

    def __iter__(self) -> Iterator[ExportItem]:
        """Items in order; turns of one tree follow each other, a root begins the next.

        Raises:
            ExportDamaged: With the offset of the record from which on nothing can be trusted.
            OSError: As the file's.
        """
        while True:
            start = self.offset
            kind, body = self._next()
            try:
                item = self._item(kind, body)
            except (InvalidRequest, ValueError, TypeError, KeyError, struct.error) as error:
                what = error.message if isinstance(error, InvalidRequest) else str(error)
                raise ExportDamaged(f"a record that does not fit: {what}", start) from None
            except msgpack.UnpackException as error:
                raise ExportDamaged(f"a record that cannot be read: {error}", start) from None
            if item is None:
                return
            yield item

    def _next(self) -> tuple[bytes, memoryview]:
        start = self.offset
        head = self._file.read(_RECORD_HEAD.size)
        if len(head) < _RECORD_HEAD.size:
            raise ExportDamaged("the file ends here, and should not", self._size)
        kind, length, checksum = _RECORD_HEAD.unpack(head)
        end = start + len(head) + length
        if length > MAX_BODY_BYTES or end > self._size:
            raise ExportDamaged("a damaged record, or the file is cut short", start)
        body = memoryview(self._file.read(length))
        if len(body) != length or _checksum(self._before, kind, length, (body,)) != checksum:
            raise ExportDamaged("a damaged record", start)
        self._before = checksum
        self.offset = end
        return kind, body

    def _item(self, kind: bytes, body: memoryview) -> ExportItem | None:
        counts = self.counts
        if kind == _END:
            self._shape.check_whole()
            if _COUNTS.unpack(body) != (counts.nodes, counts.sessions, counts.blocks):
                raise ValueError("the counts at the end are others")
            if self.offset != self._size:
                raise ExportDamaged("more follows after the end", self.offset)
            return None
        if kind == _BLOCK:
            self.counts = ExportCounts(counts.nodes, counts.sessions, counts.blocks + 1)
            return self._block(body)
        values = msgpack.unpackb(body)
        if kind == _KV:
            self._kv = _section(values)
            return self._kv
        if self._kv is not None:
            raise ValueError("turns and sessions stand before all KV")
        if kind == _NODE:
            self.counts = ExportCounts(counts.nodes + 1, counts.sessions, counts.blocks)
            return self._node(values)
        if kind == _SESSION:
            self.counts = ExportCounts(counts.nodes, counts.sessions + 1, counts.blocks)
            session = session_from_map(values)
            self._shape.add_session(session)
            return session
        raise ValueError(f"its type {bytes(kind)!r} is not known")

    def _node(self, values: object) -> NodeRecord:
        node = node_from_map(values)
        if node.parent_id is None:
            self._shape.check_whole()
            self._shape = TreeShape()
        if node.node_id in self._node_ids:
            raise ValueError(f"two turns have the number {node.node_id}")
        self._node_ids.add(node.node_id)
        self._shape.add_node(node)
        return node

    def _block(self, body: memoryview) -> ExportedBlock:
        if self._kv is None:
            raise ValueError("a block stands behind its KV identity")
        geometry = self._kv.geometry
        key, parent, fill = _BLOCK_HEAD.unpack_from(body)
        start = _BLOCK_HEAD.size + 4 * fill
        payload = body[start:]
        if not 1 <= fill <= geometry.block_size or len(payload) != geometry.block_bytes:
            raise ValueError("a block of another size")
        tokens = unpack_tokens(bytes(body[_BLOCK_HEAD.size : start]))
        return ExportedBlock(BlockRecord(BlockHash(key), BlockHash(parent), tuple(tokens)), payload)


def _checksum(
    before: bytes, kind: bytes, length: int, parts: tuple[bytes | memoryview, ...]
) -> bytes:
    checksum = xxhash.xxh3_64(before)
    checksum.update(kind + length.to_bytes(4, "little"))
    for part in parts:
        checksum.update(part)
    return checksum.digest()


def _section(values: Mapping[str, Any]) -> KVSection:
    identity, shape = values["identity"], values["geometry"]
    if not isinstance(identity, bytes) or len(identity) != 32:
        raise ValueError("a KV identity has 32 bytes")
    numbers = [shape[name] for name in _SHAPE]
    if any(type(number) is not int or not 0 < number < 2**31 for number in numbers):
        raise ValueError("the shape of a block is made of positive integers")
    if not isinstance(shape["dtype"], str) or not shape["dtype"].isascii():
        raise ValueError("the dtype of a block is a name")
    geometry = KVGeometry(dtype=shape["dtype"], **dict(zip(_SHAPE, numbers, strict=True)))
    if geometry.block_bytes > MAX_BODY_BYTES:
        raise ValueError("blocks of that size are not known")
    return KVSection(identity, geometry)
