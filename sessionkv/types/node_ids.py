"""Numbers of turns: unique in a store, and counted for each tenant by itself.

::

    63      40 39                    0
    |  row   |  number in the row   |       node id
    row 0: the tenant of an engine without keys, and all turns of before tenants had rows
    others: by the tenant's name; two tenants whose names agree in it share a row and its count

Only the number is shown, so a tenant learns from its own ids how much it has worked, and nothing of
others. In a row numbers begin above all that were given in row 0 before there were rows: no two
turns of a tenant have the same. Parents have lower ids than their children, in any row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from sessionkv.types.portable import LOCAL_TENANT

_NUMBER_BITS = 40
_ROWS = 1 << 23
"""Ids stay within 63 bits."""


def number_of(node_id: int) -> int:
    """What is shown of a node id."""
    return node_id & ((1 << _NUMBER_BITS) - 1)


def row_of(node_id: int) -> int:
    """The row that a node id is in."""
    return node_id >> _NUMBER_BITS


def first_of(row: int) -> int:
    """A node id before all of a row."""
    return row << _NUMBER_BITS


def row_for(tenant: str) -> int:
    """The row of a tenant's new turns."""
    if tenant == LOCAL_TENANT:
        return 0
    digest = hashlib.sha256(tenant.encode()).digest()
    return 1 + int.from_bytes(digest[:8], "big") % (_ROWS - 1)


class NodeIds:
    """Gives ids, each once."""

    def __init__(self, next_ids: Iterable[int], *, first_number: int) -> None:
        """Go on where a journal stands.

        Args:
            next_ids: Of each row that has any, the lowest id that was never given.
            first_number: With which the others begin.
        """
        self._next = {row_of(node_id): node_id for node_id in next_ids}
        self._first_number = first_number

    def reserve(self, tenant: str, number: int = 1) -> int:
        """The first of so many ids in a row, for turns of the tenant; lost if never used."""
        row = row_for(tenant)
        node_id = self._next.get(row, first_of(row) + self._first_number)
        self._next[row] = node_id + number
        return node_id

    def was_given(self, node_id: int) -> bool:
        """Whether it is one that was given."""
        return number_of(node_id) > 0 and node_id < self._next.get(row_of(node_id), 0)

    @property
    def next_ids(self) -> dict[int, int]:
        """By row the lowest id that was never given."""
        return dict(self._next)
