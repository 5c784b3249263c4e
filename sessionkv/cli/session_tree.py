"""``sessionkv sessions tree``: which sessions are forks of which, and where they part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text
from rich.tree import Tree

from sessionkv.cli import output

_MAX_CHAIN = 8
"""Levels from which on a chain goes on at the side."""
_Members = Mapping[str, Sequence[int]]


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


def _branch(members: _Members, start: int) -> Tree:
    """A tree of sessions whose turns are the same up to ``start``, however deep it goes.

    A long chain, where each session goes on from the one before, is not indented without end.
    """
    tree, parts = _fork(members, start)
    todo = [(tree, group, end, 1) for group, end in parts]
    while todo:
        above, group, at, depth = todo.pop()
        below, parts = _fork(group, at)
        above.children.append(below)
        is_chain = len(parts) == 1 and depth >= _MAX_CHAIN
        into = above if is_chain else below
        todo += [(into, inner, end, depth + (not is_chain)) for inner, end in parts]
    return tree


def _fork(members: _Members, start: int) -> tuple[Tree, list[tuple[_Members, int]]]:
    """One session alone, or where several part; and the groups that go on from there."""
    if len(members) == 1:
        ((name, path),) = members.items()
        return Tree(Text(_leaf(name, path))), []
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
    return tree, [(group, end) for group in reversed(apart.values())]


def _leaf(name: str, path: Sequence[int]) -> str:
    return f"{output.one_line(name)}  {output.count(len(path) - 1, 'turn')} (n-{path[-1]})"
