"""Makes the indexes of a journal of an older format anew, in one transaction.

Format 1 had none; in format 2 those by time were not by tenant, and no tenant's rows were counted.
A crash leaves the journal as it was, and the next start begins again. Nodes that no head reaches
are left out on the way. Must not change a record.
"""

from __future__ import annotations

import logging
from collections import Counter

import lmdb

from sessionkv.store.journal_records import (
    Place,
    name_key,
    node_id_of,
    node_key,
    unpack,
)
from sessionkv.store.journal_tables import Tables
from sessionkv.types import TOKEN_BYTES, HeadRecord, KeyRecord, NodeRecord

_log = logging.getLogger(__name__)

VERSION = 3
_SAY_EVERY = 100_000


def upgrade(txn: lmdb.Transaction, tables: Tables) -> None:
    """Bring the databases to :data:`VERSION`. O(journal), about 20 us a turn; repeatable."""
    for database in tables.derived:
        txn.drop(database, delete=False)
    num_nodes = int(txn.stat(tables.nodes)["entries"])
    if num_nodes:
        _log.info("the journal is brought to format %d: %d turns", VERSION, num_nodes)
    on_nodes: Counter[int] = Counter()
    for key, value in txn.cursor(tables.heads):
        head = unpack(bytes(key), bytes(value), HeadRecord)
        if head is not None:
            on_nodes[head.node_id] += 1
            tables.index_head(txn, name_key(head.tenant, head.name), head)
    for key, value in txn.cursor(tables.keys):
        record = unpack(bytes(key), bytes(value), KeyRecord)
        if record is not None:
            tables.index_key(txn, record)
    places = _places(txn, tables, on_nodes)
    for node_id in sorted(places, reverse=True):  # children before parents
        place = places[node_id]
        if place.heads or place.children:
            tables.put_place(txn, node_id, place)
            continue
        txn.delete(node_key(node_id), db=tables.nodes)
        above = places.get(place.parent_id)
        if above is not None:
            places[place.parent_id] = above.counted(children=-1)
    tables.set_version(txn, VERSION)


def _places(txn: lmdb.Transaction, tables: Tables, on_nodes: Counter[int]) -> dict[int, Place]:
    """Where each node stands that can be read and whose ancestors can."""
    places: dict[int, Place] = {}
    for number, (key, value) in enumerate(txn.cursor(tables.nodes), 1):
        if not number % _SAY_EVERY:
            _log.info("%d turns read", number)
        node = unpack(bytes(key), bytes(value), NodeRecord)
        if node is None:
            continue
        node_id, parent_id = node_id_of(bytes(key)), node.parent_id or 0
        above = places.get(parent_id)
        if parent_id and above is None:
            continue
        num_tokens = len(node.token_ids) // TOKEN_BYTES
        if above is not None:
            places[parent_id] = above.counted(children=1)
        places[node_id] = Place(
            parent_id=parent_id,
            heads=on_nodes[node_id],
            children=0,
            num_turns=0 if above is None else above.num_turns + 1,
            num_tokens=num_tokens + (0 if above is None else above.num_tokens),
            kind=node.kind,
        )
    return places
