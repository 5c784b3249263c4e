"""Sessions, their blocks and their tree in plain values, as the routes of the page give them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from sessionkv.client import Places, SessionInfo
from sessionkv.gateway.reports import cache_map


def session_map(info: SessionInfo) -> dict[str, Any]:
    """A session without its messages; ``bytes`` is empty where it was not asked for."""
    return {
        "name": info.name,
        "node": info.node,
        "turns": info.turns,
        "tokens": info.tokens,
        "kind": info.kind,
        "history": info.history,
        "created_s": info.created_s,
        "updated_s": info.updated_s,
        "pin": None if info.pin is None else asdict(info.pin),
        "bytes": {tier: asdict(held) for tier, held in info.bytes.items()},
        "budget_bytes": info.budget_bytes,
        "running": info.running,
        "queued": info.queued,
        "last_cache": None if info.last_cache is None else cache_map(info.last_cache),
    }


def history_map(info: SessionInfo) -> dict[str, Any]:
    """A session and its messages, each with the turn that it belongs to."""
    messages = zip(info.messages, info.message_nodes, strict=True)
    return {
        "session": session_map(info),
        "messages": [{**message, "node": node} for message, node in messages],
    }


def places_map(places: Places) -> dict[str, Any]:
    """Where a session's blocks are."""
    return asdict(places)


def tree_nodes(paths: Iterable[tuple[str, Sequence[str]]]) -> list[dict[str, Any]]:
    """Turns of all paths, parents first, each once.

    Args:
        paths: Name of a session, and its turns from the root.
    """
    nodes: dict[str, dict[str, Any]] = {}
    for name, path in paths:
        parent = None
        for depth, node in enumerate(path):
            if node not in nodes:
                nodes[node] = {"node": node, "parent": parent, "turn": depth, "heads": []}
            parent = node
        if parent is not None:
            nodes[parent]["heads"].append(name)
    return sorted(nodes.values(), key=lambda node: node["turn"])
