"""The part of a prompt that was found below the device, while its sequence brings it in.

Two cursors take blocks of it: computing goes from the front, loads are claimed from the back, in
each source tier by itself. A position of the table that the front has not passed is one of

========== ==================================================================
unclaimed  no cursor has taken it; its source is held
loading    a transfer writes it
there      it has arrived, or was on the device at the admission; it waits
           for the front
lost       its load failed: only computing can bring it
========== ==================================================================

Knows positions and sources; allocates, leases and publishes nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

from sessionkv.cache.prefix_index import Entry
from sessionkv.types import BlockRecord, DiskBlock, MoveOutcome, Tier


@dataclass(slots=True, eq=False)
class Load:
    """One block that is on its way to the device, or has been answered.

    Attributes:
        position: Index in the sequence's table.
        block: Device block to be filled; its one lease is the sequence's, or the transfer's where
            the sequence has ended.
        source: HOST or DISK.
        place: Host block, or slot on disk; held until the load is answered or not wanted.
        tokens: Slots of it that the sequence uses.
        private: The sequence will write behind the used slots, so the block is not published.
        entry: Index entry of a block on the host.
        transfer_id: The transfer that brings it.
        outcome: None until it is answered.
        forgotten: Its content is not to be published any more.
    """

    position: int
    record: BlockRecord
    block: int
    source: Tier
    place: int
    tokens: int
    private: bool
    entry: Entry | None = None
    transfer_id: int = 0
    outcome: MoveOutcome | None = None
    forgotten: bool = False

    @property
    def is_loading(self) -> bool:
        """A transfer writes its block."""
        return self.outcome is None

    @property
    def is_lost(self) -> bool:
        """It was answered with anything but OK."""
        return self.outcome is not None and self.outcome is not MoveOutcome.OK


class Gap:
    """Positions of one table from the first block that was not on the device to the last found.

    A history may be long, so of a position that nobody has claimed there is no object: a
    :class:`Load` is made when it is claimed.

    Attributes:
        front: First position that the front has not passed.
        stop: The position after the last.
        end_tokens: Where the found prefix ends.
        unclaimed: By tier, positions not claimed, ascending; those below ``front`` do not count.
        loading: By tier, number of blocks on their way.
        alive: The sequence still wants them; else what arrives is cached and let go.
    """

    __slots__ = (
        "_block_size",
        "_loads",
        "_lowest",
        "_places",
        "_sources",
        "_start",
        "_table",
        "alive",
        "end_tokens",
        "front",
        "loading",
        "seq_id",
        "stop",
        "unclaimed",
    )

    def __init__(
        self,
        seq_id: int,
        table: Sequence[int],
        sources: Sequence[Entry | DiskBlock | None],
        *,
        start: int,
        end_tokens: int,
        block_size: int,
    ) -> None:
        """Nothing is claimed. O(positions), and nothing is made for each.

        Args:
            seq_id: Whose it is.
            table: Its blocks, those of the gap among them; a view.
            sources: Of each position from ``start`` on what may be loaded, or None where the block
                is on the device. Host blocks are held.
            start: The first position.
            end_tokens: Where the found prefix ends; what the last block has besides is not used.
            block_size: Tokens a block.
        """
        self.seq_id = seq_id
        self._table = table
        self._sources = sources
        self._places = [-1 if source is None else _place(source) for source in sources]
        self._loads: list[Load | None] = [None] * len(sources)
        self._start = self.front = start
        self._block_size = block_size
        self.stop = start + len(sources)
        self.end_tokens = end_tokens
        self.alive = True
        self.loading = {Tier.HOST: 0, Tier.DISK: 0}
        on_host = [isinstance(source, Entry) for source in sources]
        on_disk = [isinstance(source, DiskBlock) for source in sources]
        positions = range(start, self.stop)
        self.unclaimed: dict[Tier, list[int]] = {
            Tier.HOST: [*compress(positions, on_host)],
            Tier.DISK: [*compress(positions, on_disk)],
        }
        self._lowest: int | None = start

    def at(self, position: int) -> Load | None:
        """The load of a position; None where it is unclaimed, was on the device or lies outside."""
        index = position - self._start
        return self._loads[index] if 0 <= index < len(self._loads) else None

    def is_unclaimed(self, position: int) -> bool:
        """Whether no cursor has taken a position of the gap, unless the front has passed it."""
        index = position - self._start
        return self._sources[index] is not None and self._loads[index] is None

    def unclaimed_between(self, start: int, stop: int) -> Iterator[tuple[Entry | DiskBlock, int]]:
        """Source and place of each unclaimed position between two of the gap. O(positions)."""
        part = slice(max(start - self._start, 0), max(stop - self._start, 0))
        for source, place, load in zip(
            self._sources[part], self._places[part], self._loads[part], strict=True
        ):
            if source is not None and load is None:
                yield source, place

    def held(self) -> Iterator[int]:
        """Host blocks of unclaimed positions that the front has not passed. O(positions)."""
        for source, place in self.unclaimed_between(self.front, self.stop):
            if isinstance(source, Entry):
                yield place

    def is_there(self, position: int) -> bool:
        """Whether its content is on the device, within the gap."""
        if not self.front <= position < self.stop:
            return False
        load = self.at(position)
        if load is None:
            return not self.is_unclaimed(position)
        return load.outcome is MoveOutcome.OK

    def there(self) -> list[Load | None]:
        """Those from the front on whose content is on the device, up to the first that lacks."""
        run: list[Load | None] = []
        first = self.front - self._start
        for load, source in zip(self._loads[first:], self._sources[first:], strict=True):
            if load is None:
                if source is not None:
                    break
            elif load.outcome is not MoveOutcome.OK:
                break
            run.append(load)
        return run

    def limit(self) -> int | None:
        """First position from the front on that is loading or there; None without any.

        O(1) while nothing is lost and the front has not passed the last one found.
        """
        at = self._lowest
        if at is not None:
            at = max(at, self.front)
            while at < self.stop and (
                self.is_unclaimed(at) or ((load := self.at(at)) is not None and load.is_lost)
            ):
                at += 1
            self._lowest = at = at if at < self.stop else None
        return at

    # -- changes

    def claim(self, tier: Tier, count: int) -> list[Load]:
        """The last ``count`` unclaimed positions of a tier, ascending, are loaded from now on."""
        positions = self.unclaimed[tier]
        first = max(len(positions) - count, bisect_left(positions, self.front))
        claimed = positions[first:]
        del positions[first:]
        taken = [self._load(position, tier) for position in claimed]
        for load in taken:
            self._loads[load.position - self._start] = load
        self.loading[tier] += len(taken)
        if taken and (self._lowest is None or claimed[0] < self._lowest):
            self._lowest = claimed[0]
        return taken

    def _load(self, position: int, tier: Tier) -> Load:
        index, size = position - self._start, self._block_size
        source, left = self._sources[index], self.end_tokens - position * size
        if source is None:
            raise LookupError(f"position {position} is on the device")
        tokens = size if left >= size else left
        entry = source if isinstance(source, Entry) else None
        return Load(
            position,
            source.record,
            self._table[position],
            tier,
            self._places[index],
            tokens,
            left < size,
            entry,
        )


def _place(source: Entry | DiskBlock) -> int:
    place = source.slot if isinstance(source, DiskBlock) else source.host
    if place is None:
        raise TypeError(f"{source} is in no tier to load from")
    return place
