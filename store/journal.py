"""The journal: turns, heads and idempotency keys, durable before anybody is told.

One LMDB environment with the databases ``nodes`` (node id, u64 big-endian), ``heads`` and ``keys``
(sha256 of the framed tenant and name, since names may be longer than an LMDB key) and ``meta``.
Values are a checksum and a msgpack array; ``docs/store-format.md`` has the layout.

Invariants: a commit is on disk when it returns, whole or not at all; node ids are never given
twice, also across restarts; a record that does not match its checksum is left out of
:meth:`Journal.load`, never served. Must not know what turns mean: the tree in ``cache`` decides
what is written.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import lmdb
import msgpack
import xxhash

from sessionkv.errors import StoreError, StoreUnavailable
from sessionkv.store.directory import StoreDirectory, disk_bytes
from sessionkv.store.environment import begin_read, open_environment, opening, write
from sessionkv.types import (
    DeleteHead,
    DeleteKey,
    DeleteNode,
    HeadRecord,
    JournalOp,
    JournalState,
    KeyRecord,
    NodeRecord,
    PutHead,
    PutKey,
    PutNode,
)

_log = logging.getLogger(__name__)

RECORD_VERSION = 1
_CHECKSUM_BYTES = 8
_NEXT_NODE_ID = b"next_node_id"
_U64 = struct.Struct(">Q")
_Record = TypeVar("_Record", NodeRecord, HeadRecord, KeyRecord)


class Journal:
    """The journal of a locked store directory. Used by one thread at a time; owns its environment.

    Attributes:
        quarantined: Where a damaged journal was moved to at open, None when there was none.
        damaged_records: Records that :meth:`load` left out.
    """

    def __init__(
        self, directory: StoreDirectory, *, map_bytes: int = 2**30, max_readers: int = 126
    ) -> None:
        """Open the journal, empty when there is none.

        Raises:
            StoreUnavailable: It cannot be opened.
        """
        directory.check_process()
        self._directory = directory
        self._env, self.quarantined = open_environment(
            directory.journal_path, max_dbs=4, map_bytes=map_bytes, max_readers=max_readers
        )
        self.damaged_records = 0
        with opening(directory.journal_path):
            self._nodes, self._heads, self._keys, self._meta = (
                self._env.open_db(name) for name in (b"nodes", b"heads", b"keys", b"meta")
            )
            self._file = self._file_id()

    def load(self) -> JournalState:
        """Read everything; O(journal). What is damaged is left out, counted and logged.

        A node whose parent is missing and a head whose node is missing are left out too.

        Raises:
            StoreError: Used in a fork or after :meth:`close`.
        """
        self._directory.check_process()
        self.damaged_records = 0
        with begin_read(self._env) as txn:
            nodes = self._read(txn, self._nodes, NodeRecord)
            heads = self._read(txn, self._heads, HeadRecord)
            keys = self._read(txn, self._keys, KeyRecord)
            next_node_id = self._next_node_id(txn)
        known: set[int] = set()
        whole = []
        for node in nodes:
            if node.parent_id is None or node.parent_id in known:
                known.add(node.node_id)
                whole.append(node)
        reachable = [head for head in heads if head.node_id in known]
        lost = len(nodes) - len(whole), len(heads) - len(reachable)
        if self.damaged_records or any(lost):
            _log.warning(
                "the journal %s has %d damaged records; %d turns and %d sessions that need them "
                "were left out",
                self._directory.journal_path,
                self.damaged_records,
                *lost,
            )
        return JournalState(tuple(whole), tuple(reachable), tuple(keys), next_node_id)

    def commit(self, batches: Iterable[Sequence[JournalOp]]) -> None:
        """Write all batches in one transaction; on disk when this returns. About 0.3 ms.

        Raises:
            StoreError: An operation cannot be stored, or use in a fork; nothing was written.
            StoreUnavailable: The disk is full or failed, or the file was removed; nothing was
                written.
        """
        self._directory.check_process()
        self._check_still_there()
        ops = [op for batch in batches for op in batch]

        def work(txn: lmdb.Transaction) -> None:
            for op in ops:
                self._apply(txn, op)

        try:
            write(self._env, work)
        except lmdb.Error as error:
            raise StoreUnavailable(f"the journal cannot be written: {error}") from error
        except (ValueError, TypeError, OverflowError) as error:
            raise StoreError(f"a record cannot be stored: {error}") from error

    def used_bytes(self) -> int:
        """Bytes of disk the journal takes."""
        return disk_bytes(self._directory.journal_path)

    def close(self) -> None:
        """Close the environment; harmless when done already."""
        self._env.close()

    def _check_still_there(self) -> None:
        """What is written to a file without a name is gone at the next start."""
        path = self._directory.journal_path
        try:
            found = self._file_id()
        except OSError as error:
            raise StoreUnavailable(f"the journal {path} is gone: {error}") from error
        if found != self._file:
            raise StoreUnavailable(f"the journal {path} was replaced by another")

    def _file_id(self) -> tuple[int, int]:
        found = (self._directory.journal_path / "data.mdb").stat()
        return found.st_dev, found.st_ino

    def _apply(self, txn: lmdb.Transaction, op: JournalOp) -> None:
        match op:
            case PutNode(node):
                next_node_id = self._next_node_id(txn)
                key = _U64.pack(node.node_id)
                if not txn.put(key, _pack(node), db=self._nodes, overwrite=False):
                    raise StoreError(f"turn {node.node_id} is in the journal already")
                if node.node_id >= next_node_id:
                    txn.put(_NEXT_NODE_ID, _sealed([node.node_id + 1]), db=self._meta)
            case DeleteNode(node_id):
                txn.delete(_U64.pack(node_id), db=self._nodes)
            case PutHead(head):
                txn.put(name_key(head.tenant, head.name), _pack(head), db=self._heads)
            case DeleteHead(tenant, name):
                txn.delete(name_key(tenant, name), db=self._heads)
            case PutKey(record):
                txn.put(name_key(record.tenant, record.key), _pack(record), db=self._keys)
            case DeleteKey(tenant, name):
                txn.delete(name_key(tenant, name), db=self._keys)

    def _next_node_id(self, txn: lmdb.Transaction) -> int:
        stored = txn.get(_NEXT_NODE_ID, db=self._meta)
        if stored is not None and (values := _checked(bytes(stored))) is not None:
            return int(values[0])
        cursor = txn.cursor(self._nodes)  # a new journal, or a damaged counter
        return _U64.unpack(bytes(cursor.key()))[0] + 1 if cursor.last() else 1

    def _read(
        self, txn: lmdb.Transaction, database: lmdb._Database, kind: type[_Record]
    ) -> list[_Record]:
        found = []
        for key, value in txn.cursor(database):
            record = _unpack(bytes(value), kind)
            if record is not None and _key_of(record) == key:
                found.append(record)
            else:
                self.damaged_records += 1
        return found


def name_key(tenant: str, name: str) -> bytes:
    """Database key of a head or an idempotency key: fixed length, whatever the name.

    sha256 of both strings in UTF-8, each after its length as u32 big-endian.
    """
    digest = hashlib.sha256()
    for part in (tenant.encode(), name.encode()):
        digest.update(struct.pack(">I", len(part)) + part)
    return digest.digest()


def _key_of(record: NodeRecord | HeadRecord | KeyRecord) -> bytes:
    match record:
        case NodeRecord():
            return _U64.pack(record.node_id)
        case HeadRecord():
            return name_key(record.tenant, record.name)
        case KeyRecord():
            return name_key(record.tenant, record.key)


def _pack(record: NodeRecord | HeadRecord | KeyRecord) -> bytes:
    return _sealed([getattr(record, field.name) for field in fields(record)])


def _unpack(value: bytes, kind: type[_Record]) -> _Record | None:
    values = _checked(value)
    return kind(*values) if values is not None and len(values) == len(fields(kind)) else None


def _sealed(values: list[Any]) -> bytes:
    """Version and values in msgpack, after their checksum."""
    body: bytes = msgpack.packb([RECORD_VERSION, *values])
    return xxhash.xxh3_64_digest(body) + body


def _checked(value: bytes) -> list[Any] | None:
    """The values of :func:`_sealed`, or None when they are damaged or of another version."""
    body = value[_CHECKSUM_BYTES:]
    if xxhash.xxh3_64_digest(body) != value[:_CHECKSUM_BYTES]:
        return None
    version, *values = msgpack.unpackb(body)
    return values if version == RECORD_VERSION else None
