"""Turns of a session as plain maps, a reply's worth at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sessionkv.cache.tree import TurnTree
from sessionkv.errors import NodeNotFound
from sessionkv.ipc import messages as wire
from sessionkv.types import NodeRecord
from sessionkv.types.node_ids import number_of
from sessionkv.types.portable import PortableSession, node_to_map, session_to_map
from sessionkv.types.portable_tree import node_bytes

PAGE_BYTES = 4 * 1024**2
"""A reply holds no more turns than come to about this, but always one."""


def export(tree: TurnTree, tenant: str, request: wire.Export) -> dict[str, Any]:
    """The value of the answer. O(history).

    Raises:
        SessionNotFound: There is no such session.
        NodeNotFound: A turn asked for is not on the session's path, or no longer.
    """
    head = tree.head(tenant, request.session)
    path = {number_of(record.node_id): _shown(record) for record in tree.path(head.node_id)}
    if request.nodes is None:
        shown = replace(PortableSession.of(head), node_id=number_of(head.node_id))
        return {"session": session_to_map(shown), "path": list(path)}
    records: list[dict[str, Any]] = []
    num_bytes = 0
    for node_id in request.nodes:
        record = path.get(node_id)
        if record is None:
            raise NodeNotFound(f"the session has no turn {node_id}, or no longer", node=node_id)
        num_bytes += node_bytes(record)
        if records and num_bytes > PAGE_BYTES:
            break
        records.append(node_to_map(record))
    return {"records": records}


def _shown(record: NodeRecord) -> NodeRecord:
    """With numbers as in all other answers."""
    above = record.parent_id
    return replace(
        record,
        node_id=number_of(record.node_id),
        parent_id=None if above is None else number_of(above),
    )
