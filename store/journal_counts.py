"""Sees that the counts of tenants are right when a journal is opened, and makes them anew if not.

Invariants: a right journal is seen to be right in O(tenants); what is counted are rows of the
indexes, so that what was made anew is right at the next open too. Records are not changed, and
damaged ones count as long as an index has them. Must not know what the counts are for.
"""

from __future__ import annotations

import logging
from collections import Counter

import lmdb

from sessionkv.store.journal_records import name_of, owner_of, tenant_key
from sessionkv.store.journal_tables import Damage, Tables
from sessionkv.store.journal_tenants import TenantRow, pack_tenant
from sessionkv.types import KeyRecord

_log = logging.getLogger(__name__)

_FLAG = len(tenant_key(""))
"""Where a key of ``names`` says whether the name is one that the tree made."""


def counts_agree(txn: lmdb.Transaction, tables: Tables) -> bool:
    """Whether every row of a tenant can be read and their sums are those of the indexes."""
    rows = tables.tenant_rows(txn)
    num_rows, num_names, num_unnamed, num_keys = (
        int(txn.stat(database)["entries"])
        for database in (tables.tenants, tables.names, tables.unnamed, tables.ages)
    )
    return (
        len(rows) == num_rows
        and sum(row.named for row in rows) == num_names - num_unnamed
        and sum(row.unnamed for row in rows) == num_unnamed
        and sum(row.keys for row in rows) == num_keys
    )


def recount(txn: lmdb.Transaction, tables: Tables, damage: Damage) -> int:
    """Make the rows of tenants anew; how many were wrong, each of which is noted as damaged.

    O(sessions and idempotency keys), about 2 us each; repeatable.
    """
    named, unnamed, keys, tenants = _count(txn, tables)
    before = {bytes(key): bytes(value) for key, value in txn.cursor(tables.tenants)}
    changed = 0
    for owner in before.keys() | tenants.keys():
        # A tenant that nothing readable names has no row: all that it had is damaged.
        row = TenantRow(tenants.get(owner, ""), named[owner], unnamed[owner], keys[owner])
        packed = pack_tenant(row) if owner in tenants else None
        if packed == before.get(owner):
            continue
        changed += 1
        damage.note(b"tenant" + owner)
        if packed is None:
            txn.delete(owner, db=tables.tenants)
        else:
            txn.put(owner, packed, db=tables.tenants)
    if changed:
        _log.warning(
            "the journal's counts of what tenants have were damaged for %d of them; they were made "
            "anew, and no session is lost by it",
            changed,
        )
    return changed


def _count(
    txn: lmdb.Transaction, tables: Tables
) -> tuple[Counter[bytes], Counter[bytes], Counter[bytes], dict[bytes, str]]:
    """Named and unnamed heads and keys by tenant's key, and which tenants those are."""
    tenants = {tenant_key(row.tenant): row.tenant for row in tables.tenant_rows(txn)}
    named: Counter[bytes] = Counter()
    for raw_key, name in txn.cursor(tables.names):
        key = bytes(raw_key)
        owner = owner_of(key)
        named[owner] += not key[_FLAG]
        if owner not in tenants and (head := tables.head(txn, bytes(name))) is not None:
            tenants[tenant_key(head.tenant)] = head.tenant
    _remove_stale(txn, tables)
    unnamed = Counter(owner_of(bytes(key)) for key, _ in txn.cursor(tables.unnamed))
    keys: Counter[bytes] = Counter()
    for raw_key, _ in txn.cursor(tables.ages):
        key = bytes(raw_key)
        owner = owner_of(key)
        keys[owner] += 1
        if owner not in tenants:
            record = tables.read(txn, tables.keys, name_of(key), KeyRecord)
            if record is not None:
                tenants[tenant_key(record.tenant)] = record.tenant
    return named, unnamed, keys, tenants


def _remove_stale(txn: lmdb.Transaction, tables: Tables) -> None:
    """Rows by time of heads that there are no more, which nothing else would ever remove."""
    stale = [
        bytes(key)
        for key, _ in txn.cursor(tables.unnamed)
        if txn.get(name_of(bytes(key)), db=tables.heads) is None
    ]
    for row in stale:
        txn.delete(row, db=tables.unnamed)
