"""Builders of journal records and KV blocks for tests of the store and the movers."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sessionkv.types import (
    BlockHash,
    BlockRecord,
    DiskQuery,
    HeadRecord,
    KeyRecord,
    KVGeometry,
    NodeRecord,
)


@contextmanager
def memory_store() -> Iterator[Path]:
    """A store directory in memory where there is such a place: how fast a disk is is not tested."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="sessionkv-test-", dir=place) as folder:
        yield Path(folder)


def node(node_id: int, parent_id: int | None = None, **values: object) -> NodeRecord:
    fields: dict[str, object] = {
        "node_id": node_id,
        "parent_id": parent_id,
        "kind": "root" if parent_id is None else "chat",
        "token_ids": bytes(range(8)),
        "num_incoming_tokens": 1,
        "num_messages": 2,
        "incoming_blob": b"in-%d" % node_id,
        "reply_blob": b"out\x00\xff",
        "finish_reason": "" if parent_id is None else "stop",
        "closed": True,
        "sampling_blob": b"",
        "tokenizer_digest": "t" * 64,
        "template_digest": "",
        "chain_hash": BlockHash(bytes(32)),
        "created_s": 1.5,
    }
    return NodeRecord(**(fields | values))  # type: ignore[arg-type]


def head(name: str, node_id: int, tenant: str = "local") -> HeadRecord:
    return HeadRecord(tenant, name, node_id, "host", None, 50, "keep", 1.0, 2.25)


def key(name: str, tenant: str = "local") -> KeyRecord:
    return KeyRecord(tenant, name, b"d" * 32, b"reply", 3.0)


def geometry(block_bytes: int = 4096, block_size: int = 4) -> KVGeometry:
    """A geometry with blocks of exactly ``block_bytes``."""
    return KVGeometry(1, 1, block_bytes // (2 * block_size), block_size, "int8", 1)


ROOT = BlockHash(hashlib.sha256(b"root").digest())
IDENTITY = hashlib.sha256(b"identity").digest()


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> BlockHash:
    return BlockHash(hashlib.sha256(parent + bytes(str(list(token_ids)), "ascii")).digest())


def block(parent: bytes, token_ids: Sequence[int]) -> BlockRecord:
    return BlockRecord(chain_hash(parent, token_ids), BlockHash(parent), tuple(token_ids))


def chain(token_ids: Sequence[int], block_size: int = 4, root: bytes = ROOT) -> list[BlockRecord]:
    """Records of a token sequence; the last one may be partial."""
    records: list[BlockRecord] = []
    for start in range(0, len(token_ids), block_size):
        parent = records[-1].key if records else root
        records.append(block(parent, token_ids[start : start + block_size]))
    return records


def query(token_ids: Sequence[int], block_size: int = 4, root: bytes = ROOT) -> DiskQuery:
    records = [r for r in chain(token_ids, block_size, root) if r.fill == block_size]
    return DiskQuery(tuple(r.key for r in records), BlockHash(root), tuple(token_ids), 0)


def payload(record: BlockRecord, block_bytes: int = 4096) -> bytearray:
    """Bytes that are the block's own, odd patterns included."""
    seed = hashlib.sha512(record.key).digest()
    return bytearray((seed * (block_bytes // len(seed) + 1))[:block_bytes])


class Gates:
    """Pause points: a thread that passes a shut gate says so and waits until it is opened.

    Attributes:
        arrivals: Names of the gates that threads came to, in order.
    """

    def __init__(self, *shut: str) -> None:
        self.arrivals: list[str] = []
        self.reached = {name: threading.Event() for name in shut}
        self._open = {name: threading.Event() for name in shut}

    def pass_through(self, name: str) -> None:
        self.arrivals.append(name)
        if name in self._open:
            self.reached[name].set()
            if not self._open[name].wait(60):
                raise TimeoutError(name)

    def open(self, name: str) -> None:
        self._open[name].set()
