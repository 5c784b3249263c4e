"""How much of the journal each tenant has, and whose rows go first where there are too many.

One row a tenant, kept by the same transactions as what it counts. What is past a bound on all is
taken from the tenant that has most, its oldest first, so who has no more than an equal part loses
nothing. What has run out goes whoever has it. ``journal_counts`` keeps the rows right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import lmdb

from sessionkv.store.journal_records import (
    behind,
    checked,
    owner_of,
    sealed,
    stamp_of,
    tenant_key,
)
from sessionkv.types.holdings import Holdings


@dataclass(frozen=True, slots=True)
class TenantRow:
    """What a tenant has.

    Attributes:
        named: Sessions that have a name of their own.
        unnamed: Sessions that run out by themselves.
        keys: Idempotency keys.
    """

    tenant: str
    named: int = 0
    unnamed: int = 0
    keys: int = 0


def pack_tenant(row: TenantRow) -> bytes | None:
    """Value of a row; None where the tenant has nothing, and no row."""
    if not (row.named or row.unnamed or row.keys):
        return None
    return sealed([row.tenant, row.named, row.unnamed, row.keys])


def unpack_tenant(key: bytes, value: bytes) -> TenantRow | None:
    """The row; None where it is damaged or lies under another's key."""
    values = checked(value)
    if values is None or len(values) != len(fields(TenantRow)):
        return None
    row = TenantRow(*values)
    return row if tenant_key(row.tenant) == key else None


def count(txn: lmdb.Transaction, database: lmdb._Database, tenant: str, **changes: int) -> bool:
    """A tenant has so much more or less; where it has nothing its row goes.

    False where the row is damaged: it stays so, and the next open counts anew.
    """
    key = tenant_key(tenant)
    value = txn.get(key, db=database)
    row = TenantRow(tenant) if value is None else unpack_tenant(key, bytes(value))
    if row is None:
        return False
    row = replace(row, **{what: max(0, getattr(row, what) + by) for what, by in changes.items()})
    packed = pack_tenant(row)
    if packed is None:
        txn.delete(key, db=database)
    else:
        txn.put(key, packed, db=database)
    return True


def run_out(
    txn: lmdb.Transaction,
    index: lmdb._Database,
    held: dict[bytes, int],
    *,
    until_s: float,
    keep: int,
    limit: int,
) -> list[bytes]:
    """Rows of an index by time that are to go, at most ``limit``. O(tenants and rows found).

    Args:
        txn: Reads.
        index: Its keys are those of ``stamp_key``.
        held: How many rows each tenant has there.
        until_s: Those of that time or before have run out.
        keep: Those past so many go too.
        limit: Most to be found.
    """
    found: list[bytes] = []
    for owner in _owners(txn, index):
        for row in rows_of(txn, index, owner):
            if len(found) >= limit or stamp_of(row) > until_s:
                break
            found.append(row)
    excess = int(txn.stat(index)["entries"]) - keep - len(found)
    if excess > 0:
        found += _of_the_largest(txn, index, held, gone=found, most=min(excess, limit - len(found)))
    return found


def _of_the_largest(
    txn: lmdb.Transaction,
    index: lmdb._Database,
    held: dict[bytes, int],
    *,
    gone: list[bytes],
    most: int,
) -> Iterator[bytes]:
    left = Holdings({owner.hex(): number for owner, number in held.items()})
    passed = set(gone)
    for row in gone:
        left.add(owner_of(row).hex(), -1)
    rows: dict[str, Iterator[bytes]] = {}
    while most > 0 and (largest := left.largest()) is not None:
        if largest not in rows:
            rows[largest] = rows_of(txn, index, bytes.fromhex(largest))
        oldest = next((row for row in rows[largest] if row not in passed), None)
        left.add(largest, -1 if oldest is not None else -left.of(largest))
        if oldest is not None:
            most -= 1
            yield oldest


def _owners(txn: lmdb.Transaction, index: lmdb._Database) -> Iterator[bytes]:
    cursor = txn.cursor(index)
    more = cursor.first()
    while more:
        owner = owner_of(bytes(cursor.key()))
        yield owner
        more = cursor.set_range(behind(owner))


def rows_of(txn: lmdb.Transaction, index: lmdb._Database, owner: bytes) -> Iterator[bytes]:
    """A tenant's rows of an index by time, the oldest first."""
    cursor = txn.cursor(index)
    more = cursor.set_range(owner)
    while more and owner_of(key := bytes(cursor.key())) == owner:
        yield key
        more = cursor.next()
