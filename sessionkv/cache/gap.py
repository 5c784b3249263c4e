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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sessionkv.cache.prefix_index import Entry
from sessionkv.types import BlockRecord, MoveOutcome, Tier


@dataclass(slots=True, eq=False)
class Load:
    """One block that may be loaded, is on its way to the device, or has arrived.

    Attributes:
        position: Index in the sequence's table.
        block: Device block to be filled; its one lease is the sequence's, or the transfer's where
            the sequence has ended.
        source: HOST or DISK.
        place: Host block, or slot on disk; held until the load is answered or not wanted.
        tokens: Slots of it that the sequence uses.
        private: The sequence will write behind the used slots, so the block is not published.
        entry: Index entry of a block on the host.
        transfer_id: The transfer it belongs to, None while it is unclaimed.
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
    transfer_id: int | None = None
    outcome: MoveOutcome | None = None
    forgotten: bool = False

    @property
    def is_unclaimed(self) -> bool:
        """No cursor has taken it, unless the front has passed it."""
        return self.transfer_id is None

    @property
    def is_loading(self) -> bool:
        """A transfer writes its block."""
        return self.transfer_id is not None and self.outcome is None

    @property
    def is_lost(self) -> bool:
        """It was answered with anything but OK."""
        return self.outcome is not None and self.outcome is not MoveOutcome.OK


class Gap:
    """Positions of one table from the first block that was not on the device to the last found.

    Attributes:
        front: First position that the front has not passed.
        stop: The position after the last.
        end_tokens: Where the found prefix ends.
        unclaimed: By tier, positions not claimed, ascending; those below ``front`` do not count.
        loading: By tier, number of blocks on their way.
        alive: The sequence still wants them; else what arrives is cached and let go.
    """

    __slots__ = (
        "_loads",
        "_lowest",
        "_start",
        "alive",
        "end_tokens",
        "front",
        "loading",
        "seq_id",
        "stop",
        "unclaimed",
    )

    def __init__(
        self, seq_id: int, loads: Sequence[Load | None], *, start: int, end_tokens: int
    ) -> None:
        """Nothing is claimed.

        Args:
            seq_id: Whose it is.
            loads: For each position from ``start`` on, or None where the block is on the device.
            start: The first position.
            end_tokens: Where the found prefix ends.
        """
        self.seq_id = seq_id
        self._loads = loads
        self._start = self.front = start
        self.stop = start + len(loads)
        self.end_tokens = end_tokens
        self.alive = True
        self.loading = {Tier.HOST: 0, Tier.DISK: 0}
        self.unclaimed: dict[Tier, list[int]] = {Tier.HOST: [], Tier.DISK: []}
        for load in loads:
            if load is not None:
                self.unclaimed[load.source].append(load.position)
        self._lowest: int | None = start

    def at(self, position: int) -> Load | None:
        """The load of a position, None where the block was on the device or lies outside."""
        index = position - self._start
        return self._loads[index] if 0 <= index < len(self._loads) else None

    def ahead(self) -> Iterator[Load]:
        """Loads of positions that the front has not passed. O(blocks)."""
        loads = self._loads[max(self.front - self._start, 0) :]
        return (load for load in loads if load is not None)

    def is_there(self, position: int) -> bool:
        """Whether its content is on the device, within the gap."""
        if not self.front <= position < self.stop:
            return False
        load = self.at(position)
        return load is None or load.outcome is MoveOutcome.OK

    def there(self) -> list[Load | None]:
        """Those from the front on whose content is on the device, up to the first that lacks."""
        run: list[Load | None] = []
        for load in self._loads[self.front - self._start :]:
            if load is not None and load.outcome is not MoveOutcome.OK:
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
                (load := self.at(at)) is not None and (load.is_unclaimed or load.is_lost)
            ):
                at += 1
            self._lowest = at = at if at < self.stop else None
        return at

    # -- changes

    def take(self, tier: Tier, count: int) -> list[Load]:
        """The last ``count`` unclaimed positions of a tier, ascending; they are to be claimed."""
        positions = self.unclaimed[tier]
        taken: list[Load] = []
        while positions and len(taken) < count and positions[-1] >= self.front:
            load = self.at(positions.pop())
            if load is not None:
                taken.append(load)
        taken.reverse()
        return taken

    def claimed(self, load: Load, transfer_id: int) -> None:
        """A transfer writes the block from now on."""
        load.transfer_id = transfer_id
        self.loading[load.source] += 1
        if self._lowest is None or load.position < self._lowest:
            self._lowest = load.position
