"""Sessions out of and into a running engine, as turns of the log.

Works in pieces: what is held here is a reply's worth of turns on the way out, and one tree of
turns on the way in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from sessionkv.client.client import Client
from sessionkv.errors import SessionNotFound
from sessionkv.ipc import messages as wire
from sessionkv.ipc.limits import MAX_NODES
from sessionkv.types import NodeRecord
from sessionkv.types.portable import PortableSession, node_from_map, session_from_map
from sessionkv.types.portable_tree import PortableTree, node_bytes

_PIECE_BYTES = 1024**2


def export_trees(
    client: Client,
    names: Sequence[str],
    *,
    skip_missing: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> Iterator[NodeRecord | PortableSession]:
    """The sessions' turns and the sessions, tree by tree; what branches share comes once.

    Args:
        client: Of the engine that has them.
        names: Which sessions.
        skip_missing: Leave out sessions that were deleted meanwhile.
        progress: Told how many sessions are done.

    Raises:
        SessionNotFound: There is no session of a name.
        NodeNotFound: A session was rewound meanwhile; what came so far is of no use.
    """
    trees: dict[int, list[str]] = {}
    for name in names:
        if (found := _path(client, name, skip_missing)) is not None:
            trees.setdefault(found[1][0], []).append(name)
    done = 0
    for members in trees.values():
        sent: set[int] = set()
        for name in members:
            found = _path(client, name, skip_missing)
            if found is not None:
                session, path = found
                new = [node_id for node_id in path if node_id not in sent]
                yield from _nodes(client, name, new)
                sent.update(new)
                yield session
            done += 1
            progress(done)


def session_path(client: Client, name: str) -> list[int]:
    """Numbers of a session's turns, root first; the id of one is ``n-`` and its number.

    Raises:
        SessionNotFound: There is no session of that name.
    """
    path: list[int] = client._call(wire.Export, {"session": name})["path"]
    return path


def import_tree(client: Client, tree: PortableTree) -> dict[str, Any]:
    """Send a tree of turns and its sessions; all of it is in the journal when this returns.

    Returns:
        ``{"sessions": [name], "turns": int, "other_tokenizer": [name]}``.

    Raises:
        SessionExists: A name is taken; nothing was imported.
        InvalidRequest: A turn cannot be read or does not fit; nothing was imported.
        Overloaded: More than the engine takes at once; nothing was imported.
    """
    for piece in _pieces(tree.nodes):
        client._call(wire.Import, {"nodes": piece})
    sessions = tree.sessions
    for start in range(0, len(sessions), MAX_NODES):
        last = start + MAX_NODES >= len(sessions)
        fields = {"sessions": sessions[start : start + MAX_NODES], "commit": last}
        value: dict[str, Any] = client._call(wire.Import, fields, has_timeout=not last)
    return value


def _path(
    client: Client, name: str, skip_missing: bool
) -> tuple[PortableSession, list[int]] | None:
    try:
        value = client._call(wire.Export, {"session": name})
    except SessionNotFound:
        if skip_missing:
            return None
        raise
    return session_from_map(value["session"]), value["path"]


def _nodes(client: Client, name: str, node_ids: Sequence[int]) -> Iterator[NodeRecord]:
    start = 0
    while start < len(node_ids):
        asked = node_ids[start : start + MAX_NODES]
        records = client._call(wire.Export, {"session": name, "nodes": asked})["records"]
        start += len(records)
        yield from map(node_from_map, records)


def _pieces(nodes: Iterable[NodeRecord]) -> Iterator[list[NodeRecord]]:
    piece: list[NodeRecord] = []
    size = 0
    for node in nodes:
        if piece and (size + node_bytes(node) > _PIECE_BYTES or len(piece) == MAX_NODES):
            yield piece
            piece, size = [], 0
        piece.append(node)
        size += node_bytes(node)
    if piece:
        yield piece
