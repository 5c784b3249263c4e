"""``sessionkv sessions tree``: which sessions are forks of which, and where they part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text
from rich.tree import Tree

from sessionkv.cli import output


def session_trees(paths: Mapping[str, Sequence[int]]) -> list[Tree]:
    """One tree for each root, from each session's turns, root first. O(turns)."""
    roots: dict[int, dict[str, Sequence[int]]] = {}
    for name, path in sorted(paths.items()):
        roots.setdefault(path[0], {})[name] = path
    return [_branch(members, 0) for members in roots.values()]


def nested(paths: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """The same as plain values: ``{"name", "turns", "node", "path"}`` of each session."""
    return [
        {"name": name, "turns": len(path) - 1, "node": f"n-{path[-1]}", "path": list(path)}
        for name, path in sorted(paths.items())
    ]


def _branch(members: Mapping[str, Sequence[int]], start: int) -> Tree:
    """Sessions whose turns are the same up to ``start``: a fork, or one session alone."""
    if len(members) == 1:
        ((name, path),) = members.items()
        return Tree(Text(_leaf(name, path)))
    shortest = min(len(path) for path in members.values())
    first, *others = members.values()
    end = start
    while end < shortest and all(path[end] == first[end] for path in others):
        end += 1
    tree = Tree(Text(f"turn {end - 1} (n-{first[end - 1]})", style="dim"))
    apart: dict[int, dict[str, Sequence[int]]] = {}
    for name, path in members.items():
        if len(path) == end:
            tree.add(Text(_leaf(name, path)))
        else:
            apart.setdefault(path[end], {})[name] = path
    for group in apart.values():
        tree.children.append(_branch(group, end))
    return tree


def _leaf(name: str, path: Sequence[int]) -> str:
    return f"{output.one_line(name)}  {output.count(len(path) - 1, 'turn')} (n-{path[-1]})"
