"""From block hash to where the block is in memory, and from a parent to its children.

An entry exists while a device or host block holds its content; what is on disk only, the store
answers for. A hit is an equal key **and** equal parent and tokens. Looking up never changes
anything. Knows no leases and no order of eviction.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sessionkv.types import BlockHash, BlockRecord, Tier

_Row = tuple[tuple[int, ...], BlockHash]


@dataclass(slots=True, eq=False)
class Entry:
    """One block's content and where it is.

    Attributes:
        device: Device block that holds it, or None.
        host: Host block that holds it, or None.
        on_disk: A committed record of it is on disk, as far as is known.
        disk_below: Children of it that memory lacks may be on disk.
        host_refused: Copying it to the host failed: the device may drop it without.
        disk_refused: Writing it to disk failed, or the disk did not keep it: likewise.
    """

    record: BlockRecord
    device: int | None = None
    host: int | None = None
    on_disk: bool = False
    disk_below: bool = False
    host_refused: bool = False
    disk_refused: bool = False

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """All tiers that hold it, as far as is known."""
        held = (
            (Tier.DEVICE, self.device is not None),
            (Tier.HOST, self.host is not None),
            (Tier.DISK, self.on_disk),
        )
        return tuple(tier for tier, is_held in held if is_held)

    @property
    def tier(self) -> Tier:
        """The fastest tier that holds it."""
        return Tier.DEVICE if self.device is not None else Tier.HOST


class PrefixIndex:
    """Entries by key, and the children of each parent in token order."""

    def __init__(self) -> None:
        self.entries: dict[BlockHash, Entry] = {}
        """By key; read by the matcher's loop, changed by :meth:`add` and :meth:`remove` alone."""
        self._children: dict[BlockHash, list[_Row]] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def get(self, key: BlockHash) -> Entry | None:
        """Entry of a key whose content is not in question."""
        return self.entries.get(key)

    def find(self, record: BlockRecord) -> Entry | None:
        """Entry with equal key, parent and tokens."""
        entry = self.entries.get(record.key)
        return entry if entry is not None and entry.record == record else None

    def add(self, entry: Entry) -> None:
        """Name a block's content. The key must not be in use."""
        record = entry.record
        if record.key in self.entries:
            raise KeyError(f"block {record.key.hex()} is indexed already")
        self.entries[record.key] = entry
        insort(self._children.setdefault(record.parent, []), (record.token_ids, record.key))

    def remove(self, entry: Entry) -> None:
        """Forget a block's content."""
        record = entry.record
        del self.entries[record.key]
        rows = self._children[record.parent]
        del rows[bisect_left(rows, (record.token_ids, record.key))]
        if not rows:
            del self._children[record.parent]

    def children(self, parent: BlockHash) -> list[Entry]:
        """Entries whose parent it is, in token order."""
        return [self.entries[key] for _, key in self._children.get(parent, ())]

    def best_child(self, parent: BlockHash, token_ids: Sequence[int]) -> tuple[Entry, int] | None:
        """The child that shares most leading tokens with ``token_ids``, and how many (at least 1).

        In token order the longest common prefix is with a neighbour of the place where
        ``token_ids`` would stand. Of equals, one on the device, then one that ends where the common
        prefix does (it can be continued in place), is preferred. O(log children).
        """
        rows = self._children.get(parent)
        if rows is None:
            return None
        wanted = tuple(token_ids)
        place = bisect_left(rows, (wanted,))
        near = rows[max(place - 1, 0) : place + 1]
        shared = max(common_prefix(tokens, wanted) for tokens, _ in near)
        if shared == 0:
            return None
        exact = bisect_left(rows, (wanted[:shared],))
        best = max(
            (
                self.entries[key]
                for tokens, key in [*near, *rows[exact : exact + 1]]
                if common_prefix(tokens, wanted) == shared
            ),
            key=lambda entry: (entry.device is not None, entry.record.fill == shared),
        )
        return best, shared


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of equal leading items."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
