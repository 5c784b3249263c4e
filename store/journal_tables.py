"""The journal's databases and what each change does to them, within a transaction of the caller.

Records (``nodes``, ``heads``, ``keys``) with ``meta`` are the truth. The others follow from them
and are kept by the same transactions, so that nobody ever has to read everything:

    places     node -> parent, heads on it, nodes after it, turns and tokens up to it
    names      tenant, name -> head, in the order of names
    pins       heads that are pinned
    unnamed    of each tenant the heads that run out by themselves, that used longest ago first
    ages       of each tenant the idempotency keys, oldest first
    tenants    how many heads and keys each tenant has in names, unnamed and ages

Invariants: a node whose count of heads and children is wrong counts too many, never too few, so it
is kept too long and never lost; rows of the indexes are checked against the records where they are
read; a new head never replaces another. Must not know what turns mean: the tree in ``cache``
decides what is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import lmdb

from sessionkv.errors import StoreError
from sessionkv.store.journal_records import (
    Place,
    Record,
    checked,
    name_key,
    name_of,
    node_id_of,
    node_key,
    order_key,
    owner_of,
    pack,
    pack_place,
    sealed,
    stamp_key,
    tenant_key,
    unpack,
    unpack_place,
)
from sessionkv.store.journal_tenants import TenantRow, count, rows_of, run_out, unpack_tenant
from sessionkv.types import (
    TOKEN_BYTES,
    DeleteHead,
    DeleteKey,
    DeleteNode,
    DropSession,
    ForgetKeys,
    HeadRecord,
    JournalOp,
    KeepIds,
    KeyRecord,
    NodeRecord,
    PutHead,
    PutKey,
    PutNode,
)
from sessionkv.types.node_ids import first_of, row_of

NUM_DATABASES = 10
UNNAMED_PREFIX = "~"
FORGET_BATCH = 1_000
"""Keys that one :class:`~sessionkv.types.records.ForgetKeys` takes at most."""
_MAX_DAMAGE = 65_536
_NEXT_NODE_ID = b"next_node_id"
_ROW_BYTES = 3
_FIRST_NUMBER = b"first_number"
_VERSION = b"version"


class Damage:
    """Counts rows that were found unreadable, each once and up to a bound."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    @property
    def count(self) -> int:
        """How many were found."""
        return len(self._keys)

    def note(self, key: bytes) -> None:
        """A row was found so."""
        if len(self._keys) < _MAX_DAMAGE:
            self._keys.add(key)


class Tables:
    """Databases of one environment. All methods take a transaction of it."""

    def __init__(self, env: lmdb.Environment, damage: Damage) -> None:
        """Open the databases, made if need be."""
        self.nodes, self.heads, self.keys, self.meta = (
            env.open_db(name) for name in (b"nodes", b"heads", b"keys", b"meta")
        )
        self.places, self.pins, self.unnamed, self.ages = (
            env.open_db(name) for name in (b"places", b"pins", b"unnamed", b"ages")
        )
        self.tenants = env.open_db(b"tenants")
        # Names that agree in their first 400 bytes share a key.
        self.names = env.open_db(b"names", dupsort=True, dupfixed=True)
        self._damage = damage

    @property
    def all(self) -> tuple[lmdb._Database, ...]:
        """Every database."""
        return (
            self.nodes, self.heads, self.keys, self.meta,
            self.places, self.names, self.pins, self.unnamed, self.ages, self.tenants,
        )  # fmt: skip

    @property
    def derived(self) -> tuple[lmdb._Database, ...]:
        """Those that follow from the records."""
        return self.places, self.names, self.pins, self.unnamed, self.ages, self.tenants

    # Reading ---------------------------------------------------------------------------------

    def read(
        self, txn: lmdb.Transaction, database: lmdb._Database, key: bytes, kind: type[Record]
    ) -> Record | None:
        """A record; None where there is none or it is damaged, which is counted."""
        value = txn.get(key, db=database)
        if value is None:
            return None
        record = unpack(key, bytes(value), kind)
        if record is None:
            self._damage.note(key)
        return record

    def node(self, txn: lmdb.Transaction, node_id: int) -> NodeRecord | None:
        """A node."""
        return self.read(txn, self.nodes, node_key(node_id), NodeRecord)

    def head(self, txn: lmdb.Transaction, key: bytes) -> HeadRecord | None:
        """A head by its name key."""
        return self.read(txn, self.heads, key, HeadRecord)

    def place(self, txn: lmdb.Transaction, node_id: int) -> Place | None:
        """A node's place."""
        value = txn.get(node_key(node_id), db=self.places)
        if value is None:
            return None
        place = unpack_place(node_id, bytes(value))
        if place is None:
            self._damage.note(b"place" + node_key(node_id))
        return place

    def tenant_rows(self, txn: lmdb.Transaction) -> list[TenantRow]:
        """What each tenant has that has anything; damaged rows are left out. O(tenants)."""
        found = []
        for key, value in txn.cursor(self.tenants):
            row = unpack_tenant(bytes(key), bytes(value))
            if row is not None:
                found.append(row)
            else:
                self._damage.note(b"tenant" + bytes(key))
        return found

    def next_node_id(self, txn: lmdb.Transaction, row: int = 0) -> int:
        """Lowest id of a row that was never given."""
        stored = txn.get(_next_id_key(row), db=self.meta)
        if stored is not None and (values := checked(bytes(stored))) is not None:
            return int(values[0])
        cursor = txn.cursor(self.nodes)  # a new row, or a damaged counter
        is_before = (
            cursor.prev() if cursor.set_range(node_key(first_of(row + 1))) else cursor.last()
        )
        last = node_id_of(bytes(cursor.key())) if is_before else 0
        return last + 1 if row_of(last) == row else first_of(row) + self.first_number(txn)

    def other_next_ids(self, txn: lmdb.Transaction) -> tuple[int, ...]:
        """The same of all rows but the first that have a counter."""
        found: list[int] = []
        cursor = txn.cursor(self.meta)
        more = cursor.set_range(_NEXT_NODE_ID)
        while more and (key := bytes(cursor.key())).startswith(_NEXT_NODE_ID):
            if key != _NEXT_NODE_ID:
                found.append(self.next_node_id(txn, _row_of_key(key)))
            more = cursor.next()
        return tuple(found)

    def first_number(self, txn: lmdb.Transaction) -> int:
        """With which rows begin: above all that were given when there was only one."""
        stored = txn.get(_FIRST_NUMBER, db=self.meta)
        values = None if stored is None else checked(bytes(stored))
        return self.next_node_id(txn) if values is None else int(values[0])

    def version(self, txn: lmdb.Transaction) -> int:
        """Format of the databases; those of format 1 do not say."""
        stored = txn.get(_VERSION, db=self.meta)
        values = None if stored is None else checked(bytes(stored))
        return 1 if values is None else int(values[0])

    # Writing ---------------------------------------------------------------------------------

    def set_version(self, txn: lmdb.Transaction, version: int) -> None:
        """Say that the databases are of this format, and where rows of ids begin in it."""
        if txn.get(_FIRST_NUMBER, db=self.meta) is None:
            txn.put(_FIRST_NUMBER, sealed([self.next_node_id(txn)]), db=self.meta)
        txn.put(_VERSION, sealed([version]), db=self.meta)

    def apply_all(self, txn: lmdb.Transaction, batches: Iterable[Sequence[JournalOp]]) -> None:
        """Carry out all operations, as :meth:`apply` does."""
        for batch in batches:
            for op in batch:
                self.apply(txn, op)

    def apply(self, txn: lmdb.Transaction, op: JournalOp) -> None:
        """Carry out one operation.

        Raises:
            StoreError: It cannot be: its node, or its new head, is there already.
        """
        match op:
            case PutNode(node):
                self._put_node(txn, node)
            case DeleteNode(node_id):
                self._delete_node(txn, node_id)
            case PutHead(head, is_new):
                if is_new and txn.get(name_key(head.tenant, head.name), db=self.heads) is not None:
                    raise StoreError(f"the session {head.name!r} is in the journal already")
                self._set_head(txn, head.tenant, head.name, head)
            case DeleteHead(tenant, name):
                self._set_head(txn, tenant, name, None)
            case DropSession(tenant, name):
                self._drop_session(txn, tenant, name)
            case PutKey(key):
                self._put_key(txn, key)
            case DeleteKey(tenant, name):
                self._delete_key(txn, tenant, name)
            case ForgetKeys(created_until_s, keep):
                self._forget_keys(txn, created_until_s, keep)
            case KeepIds(next_node_id):
                self._keep_ids(txn, next_node_id)

    def put_place(self, txn: lmdb.Transaction, node_id: int, place: Place) -> None:
        """Write a node's place."""
        txn.put(node_key(node_id), pack_place(node_id, place), db=self.places)

    def index_head(self, txn: lmdb.Transaction, key: bytes, head: HeadRecord) -> None:
        """Put a head into the indexes that it belongs in, and count it."""
        for database, row in self._rows(key, head):
            txn.put(row, key if database is self.names else b"", db=database)
        self._count_head(txn, head.tenant, head.name, 1)

    def index_key(self, txn: lmdb.Transaction, record: KeyRecord) -> None:
        """Put an idempotency key into the index by age, and count it."""
        name = name_key(record.tenant, record.key)
        row = stamp_key(record.tenant, record.created_s, name)
        if txn.put(row, b"", db=self.ages, overwrite=False):
            self._tally(txn, record.tenant, keys=1)

    def _put_node(self, txn: lmdb.Transaction, node: NodeRecord) -> None:
        if not txn.put(node_key(node.node_id), pack(node), db=self.nodes, overwrite=False):
            raise StoreError(f"turn {node.node_id} is in the journal already")
        self._keep_ids(txn, node.node_id + 1)
        above = self._count(txn, node.parent_id or 0, children=1)
        num_tokens = len(node.token_ids) // TOKEN_BYTES
        self.put_place(
            txn,
            node.node_id,
            Place(
                parent_id=node.parent_id or 0,
                heads=0,
                children=0,
                num_turns=0 if above is None else above.num_turns + 1,
                num_tokens=num_tokens + (0 if above is None else above.num_tokens),
                kind=node.kind,
            ),
        )

    def _delete_node(self, txn: lmdb.Transaction, node_id: int) -> Place | None:
        place = self.place(txn, node_id)
        txn.delete(node_key(node_id), db=self.nodes)
        txn.delete(node_key(node_id), db=self.places)
        return None if place is None else self._count(txn, place.parent_id, children=-1)

    def _count(
        self, txn: lmdb.Transaction, node_id: int, *, heads: int = 0, children: int = 0
    ) -> Place | None:
        """Count what reaches a node; its place now, None where it has none."""
        place = self.place(txn, node_id) if node_id else None
        if place is not None:
            place = place.counted(heads=heads, children=children)
            self.put_place(txn, node_id, place)
        return place

    def _count_head(self, txn: lmdb.Transaction, tenant: str, name: str, by: int) -> None:
        if name.startswith(UNNAMED_PREFIX):
            self._tally(txn, tenant, unnamed=by)
        else:
            self._tally(txn, tenant, named=by)

    def _tally(self, txn: lmdb.Transaction, tenant: str, **changes: int) -> None:
        if not count(txn, self.tenants, tenant, **changes):
            self._damage.note(b"tenant" + tenant_key(tenant))

    def _set_head(
        self, txn: lmdb.Transaction, tenant: str, name: str, new: HeadRecord | None
    ) -> None:
        key = name_key(tenant, name)
        was_there = txn.get(key, db=self.heads) is not None  # one that is damaged too
        if was_there != (new is not None):
            self._count_head(txn, tenant, name, -1 if was_there else 1)
        old = self.head(txn, key)
        if old is not None and (new is None or old.node_id != new.node_id):
            self._count(txn, old.node_id, heads=-1)
        if new is not None and (old is None or old.node_id != new.node_id):
            self._count(txn, new.node_id, heads=1)
        before = self._rows(key, old) if old is not None else set()
        after = self._rows(key, new) if new is not None else set()
        for database, row in before - after:
            txn.delete(row, key if database is self.names else b"", db=database)
        for database, row in after - before:
            txn.put(row, key if database is self.names else b"", db=database)
        if new is not None:
            txn.put(key, pack(new), db=self.heads)
        else:
            txn.delete(key, db=self.heads)

    def _rows(self, key: bytes, head: HeadRecord) -> set[tuple[lmdb._Database, bytes]]:
        """Rows of the indexes that a head has."""
        unnamed = head.name.startswith(UNNAMED_PREFIX)
        rows = {(self.names, order_key(head.tenant, head.name, unnamed=unnamed))}
        if head.pin_tier:
            rows.add((self.pins, key))
        if unnamed:
            rows.add((self.unnamed, stamp_key(head.tenant, head.updated_s, key)))
        return rows

    def _drop_session(self, txn: lmdb.Transaction, tenant: str, name: str) -> None:
        """Places tell the way up also where a node itself cannot be read."""
        key = name_key(tenant, name)
        head = self.head(txn, key)
        self._set_head(txn, tenant, name, None)
        if head is None:  # unreadable itself: what it led to is not known, its name is
            unnamed = name.startswith(UNNAMED_PREFIX)
            txn.delete(order_key(tenant, name, unnamed=unnamed), key, db=self.names)
            txn.delete(key, db=self.pins)
            if unnamed:
                rows = rows_of(txn, self.unnamed, tenant_key(tenant))
                for row in [row for row in rows if name_of(row) == key]:
                    txn.delete(row, db=self.unnamed)
            return
        node_id, place = head.node_id, self.place(txn, head.node_id)
        while place is not None and not place.heads and not place.children:
            above = self._delete_node(txn, node_id)
            node_id, place = place.parent_id, above

    def _put_key(self, txn: lmdb.Transaction, record: KeyRecord) -> None:
        self._delete_key(txn, record.tenant, record.key)
        txn.put(name_key(record.tenant, record.key), pack(record), db=self.keys)
        self.index_key(txn, record)

    def _delete_key(self, txn: lmdb.Transaction, tenant: str, key: str) -> None:
        name = name_key(tenant, key)
        old = self.read(txn, self.keys, name, KeyRecord)
        if old is not None and txn.delete(stamp_key(tenant, old.created_s, name), db=self.ages):
            self._tally(txn, tenant, keys=-1)
        txn.delete(name, db=self.keys)

    def _forget_keys(self, txn: lmdb.Transaction, created_until_s: float, keep: int) -> None:
        tenants = {tenant_key(row.tenant): row for row in self.tenant_rows(txn)}
        held = {owner: row.keys for owner, row in tenants.items()}
        ended = run_out(
            txn, self.ages, held, until_s=created_until_s, keep=keep, limit=FORGET_BATCH
        )
        forgotten: Counter[bytes] = Counter()
        for row in ended:
            txn.delete(name_of(row), db=self.keys)
            forgotten[owner_of(row)] += txn.delete(row, db=self.ages)
        for owner, number in forgotten.items():
            if owner in tenants:
                self._tally(txn, tenants[owner].tenant, keys=-number)

    def _keep_ids(self, txn: lmdb.Transaction, next_node_id: int) -> None:
        row = row_of(next_node_id)
        key = _next_id_key(row)
        if txn.get(key, db=self.meta) is None or next_node_id > self.next_node_id(txn, row):
            txn.put(key, sealed([next_node_id]), db=self.meta)


def _next_id_key(row: int) -> bytes:
    """Key in ``meta`` of a row's counter; the first row has that of when it was the only one."""
    return _NEXT_NODE_ID + (row.to_bytes(_ROW_BYTES, "big") if row else b"")


def _row_of_key(key: bytes) -> int:
    return int.from_bytes(key.removeprefix(_NEXT_NODE_ID), "big")
