"""Journals that could not be read and were moved aside: which there are, and since when.

They hold somebody's conversations, so nothing here or elsewhere removes them. Must not know what a
journal holds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

_MARK = ".damaged-"


@dataclass(frozen=True, slots=True)
class SetAside:
    """A folder that was moved aside.

    Attributes:
        path: Where it is now.
        moved_s: When it was moved there, wall seconds; as far as the folder's own time tells.
    """

    path: Path
    moved_s: float

    @property
    def moved_at(self) -> str:
        """:attr:`moved_s` in UTC, ISO 8601, whole seconds."""
        return datetime.fromtimestamp(self.moved_s, UTC).isoformat(timespec="seconds")


def move_aside(path: Path) -> Path:
    """Move the folder ``path`` to the first name beside it that is free; that name.

    Raises:
        OSError: The disk refuses.
    """
    number = 1
    while (moved := path.with_name(f"{path.name}{_MARK}{number}")).exists():
        number += 1
    path.rename(moved)
    os.utime(moved)  # renaming leaves the folder's own time alone
    return moved


def set_aside(path: Path) -> tuple[SetAside, ...]:
    """The folders that ``path`` was moved aside to and that are there still, the first one first.

    Any thread. O(names beside ``path``).
    """
    found = []
    for moved in path.parent.glob(f"{path.name}{_MARK}*"):
        number = moved.name.removeprefix(f"{path.name}{_MARK}")
        if not (number.isascii() and number.isdigit()):
            continue
        try:
            found.append((int(number), SetAside(moved, moved.stat().st_mtime)))
        except FileNotFoundError:
            continue  # its owner removed it meanwhile
    return tuple(item for _, item in sorted(found, key=lambda pair: pair[0]))
