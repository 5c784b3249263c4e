"""Questions to the journal, each answered from one read transaction without reading the rest.

A chain is read from its head up to its root, every record checked; one that is damaged makes its
session one that cannot be opened. Must not know who asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import lmdb

from sessionkv.store.journal_records import (
    Record,
    name_key,
    name_of,
    order_key,
    tenant_key,
    tenant_part,
    unpack,
)
from sessionkv.store.journal_tables import UNNAMED_PREFIX, Damage, Tables
from sessionkv.store.journal_tenants import run_out
from sessionkv.store.questions import Due, FindDue
from sessionkv.types import (
    HeadRecord,
    JournalSummary,
    KeyRecord,
    SessionRow,
    StoredNode,
    StoredSession,
    TenantSessions,
)
from sessionkv.types.node_ids import number_of

_UNKNOWN_COUNT = 2**31
"""Stands for a count that cannot be read: what may be needed is never freed."""


@dataclass(frozen=True, slots=True)
class JournalFigures:
    """Counts of a journal.

    Attributes:
        damaged_records: Records found unreadable since it was opened.
        compactions: How often it was replaced by a copy without free pages.
    """

    num_nodes: int = 0
    num_keys: int = 0
    damaged_records: int = 0
    compactions: int = 0


def figures(
    txn: lmdb.Transaction, tables: Tables, damaged_records: int, compactions: int
) -> JournalFigures:
    """Counts as they are now. O(1)."""
    return JournalFigures(
        num_nodes=int(txn.stat(tables.nodes)["entries"]),
        num_keys=int(txn.stat(tables.keys)["entries"]),
        damaged_records=damaged_records,
        compactions=compactions,
    )


def read_all(
    txn: lmdb.Transaction, database: lmdb._Database, kind: type[Record], damage: Damage
) -> list[Record]:
    """Every record of a database; those that are damaged are noted and left out. O(records)."""
    found = []
    for raw_key, value in txn.cursor(database):
        key = bytes(raw_key)
        record = unpack(key, bytes(value), kind)
        if record is not None:
            found.append(record)
        else:
            damage.note(key)
    return found


def summary(txn: lmdb.Transaction, tables: Tables) -> JournalSummary:
    """Counts and pinned heads. O(pinned heads and tenants).

    Whether there is a session that nobody knows of must not hang on rows of tenants: how many there
    are says LMDB.
    """
    pinned = (tables.head(txn, bytes(key)) for key, _ in txn.cursor(tables.pins))
    return JournalSummary(
        tenants=tuple(
            TenantSessions(row.tenant, row.named, row.unnamed)
            for row in tables.tenant_rows(txn)
            if row.named or row.unnamed
        ),
        next_node_id=tables.next_node_id(txn),
        other_next_ids=tables.other_next_ids(txn),
        first_number=tables.first_number(txn),
        pinned=tuple((head.tenant, head.name) for head in pinned if head is not None),
        num_sessions=int(txn.stat(tables.heads)["entries"]),
    )


def find_session(
    txn: lmdb.Transaction, tables: Tables, tenant: str, name: str
) -> StoredSession | None:
    """A session with its whole chain, None where there is none. O(turns), about 10 us each."""
    key = name_key(tenant, name)
    head = tables.head(txn, key)
    if head is None:
        if txn.get(key, db=tables.heads) is None:
            return None
        nobody = HeadRecord(tenant, name, 0, "", None, 0, "", 0.0, 0.0)
        return StoredSession(nobody, (), "its head")
    chain: list[StoredNode] = []
    node_id: int | None = head.node_id
    while node_id is not None:
        record = tables.node(txn, node_id)
        if record is None or (record.parent_id or 0) >= node_id:
            return StoredSession(head, (), f"turn n-{number_of(node_id)}")
        place = tables.place(txn, node_id)
        heads = _UNKNOWN_COUNT if place is None else place.heads
        children = _UNKNOWN_COUNT if place is None else place.children
        chain.append(StoredNode(record, heads, children))
        node_id = record.parent_id
    return StoredSession(head, tuple(reversed(chain)))


def find_key(txn: lmdb.Transaction, tables: Tables, tenant: str, key: str) -> KeyRecord | None:
    """What is kept under an idempotency key."""
    return tables.read(txn, tables.keys, name_key(tenant, key), KeyRecord)


def list_sessions(
    txn: lmdb.Transaction,
    tables: Tables,
    tenant: str,
    *,
    prefix: str,
    after: str | None,
    limit: int,
) -> tuple[tuple[SessionRow, ...], str | None]:
    """Sessions of a tenant by name, and the ``after`` of the next page (None at the end).

    Unnamed ones only where ``prefix`` begins with ``~``. O(log sessions + limit), but for names
    that agree in their first 400 bytes, which are read together.
    """
    found: list[SessionRow] = []
    for head in _heads_from(txn, tables, tenant, prefix, after):
        if len(found) == limit:
            return tuple(found), found[-1].head.name
        place = tables.place(txn, head.node_id)
        if place is None:
            found.append(SessionRow(head, "", 0, 0))
        else:
            found.append(SessionRow(head, place.kind, place.num_turns, place.num_tokens))
    return tuple(found), None


def find_due(txn: lmdb.Transaction, tables: Tables, asked: FindDue) -> Due:
    """Unnamed heads and idempotency keys that have run out or are too many.

    O(tenants and heads found).
    """
    tenants = {tenant_key(row.tenant): row for row in tables.tenant_rows(txn)}
    rows = run_out(
        txn,
        tables.unnamed,
        {owner: row.unnamed for owner, row in tenants.items()},
        until_s=asked.unnamed_until_s,
        keep=asked.keep_unnamed,
        limit=asked.limit,
    )
    heads = (tables.head(txn, name_of(row)) for row in rows)
    keys = run_out(
        txn,
        tables.ages,
        {owner: row.keys for owner, row in tenants.items()},
        until_s=asked.keys_until_s,
        keep=asked.keep_keys,
        limit=1,
    )
    return Due(tuple((head.tenant, head.name) for head in heads if head is not None), bool(keys))


def _heads_from(
    txn: lmdb.Transaction, tables: Tables, tenant: str, prefix: str, after: str | None
) -> Iterator[HeadRecord]:
    """A tenant's heads in order of their names: those with the prefix, after a name."""
    start = prefix if after is None else max(prefix, after)
    cursor = txn.cursor(tables.names)
    first = order_key(tenant, start, unnamed=prefix.startswith(UNNAMED_PREFIX))
    more = cursor.set_range(first)
    while more and tenant_part(bytes(cursor.key())) == tenant_part(first):
        group = [tables.head(txn, bytes(key)) for key in cursor.iternext_dup()]
        heads = [head for head in group if head is not None]
        for head in sorted(heads, key=lambda head: head.name):
            if after is not None and head.name <= after:
                continue
            if head.name.startswith(prefix):
                yield head
            elif head.name > prefix:
                return
        more = cursor.next_nodup()
