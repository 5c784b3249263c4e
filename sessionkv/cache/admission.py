"""From a match to a sequence with its first blocks: held, copied on write, or in its gap.

=========  =========================  ======================================
source     full block                 block matched in its first k slots
=========  =========================  ======================================
device     held                       continued in place if it ends there and
                                      nobody holds it, else copied; not used
                                      behind blocks of lower tiers
host       may be loaded, published   may be loaded, private
disk       may be loaded, published   may be loaded, private
=========  =========================  ======================================
"""

from __future__ import annotations

from dataclasses import dataclass

from sessionkv.cache.chain import TokenChain
from sessionkv.cache.gap import Gap
from sessionkv.cache.matching import Found, Source, tier_of
from sessionkv.cache.prefix_index import Entry
from sessionkv.cache.residency import Residency
from sessionkv.cache.sequence import RunningSequence, TailOrigin
from sessionkv.types import Admission, BlockCopy, Tier


@dataclass(slots=True)
class Choice:
    """What of a match is used.

    Attributes:
        held: Device blocks of the leading full blocks.
        rest: Full blocks past them, in order.
        tail: Block whose first ``tail_tokens`` slots are used, or None.
        tokens: How many tokens are in each tier, the tail's among them.
        loads: How many blocks are in a lower tier, the tail included.
        in_place: The tail is continued where it is.
    """

    held: list[int]
    rest: list[Source]
    tokens: dict[Tier, int]
    loads: int
    tail: Source | None = None
    tail_tokens: int = 0
    in_place: bool = False

    @property
    def num_blocks(self) -> int:
        """Full blocks used."""
        return len(self.held) + len(self.rest)

    @property
    def fresh_blocks(self) -> int:
        """Device blocks to allocate."""
        copied = self.tail is not None and not self.in_place and tier_of(self.tail) is Tier.DEVICE
        return self.loads + copied

    def blocks_in(self, tier: Tier) -> list[int]:
        """Blocks in DEVICE or HOST that are used there, in order of the chain."""
        sources = self.rest if self.tail is None else [*self.rest, self.tail]
        entries = [source for source in sources if isinstance(source, Entry)]
        if tier is Tier.DEVICE:
            return self.held + [e.device for e in entries if e.device is not None]
        return [e.host for e in entries if e.device is None and e.host is not None]


def choose(found: Found, residency: Residency) -> Choice:
    """What of a match is used: all but some tails. A question."""
    size = residency.block_size
    tokens = dict.fromkeys(Tier, 0)
    entries = [source for source in found.rest if isinstance(source, Entry)]
    num_on_device = sum(entry.device is not None for entry in entries)
    tokens[Tier.DEVICE] = (len(found.held) + num_on_device) * size
    tokens[Tier.HOST] = (len(entries) - num_on_device) * size
    tokens[Tier.DISK] = (len(found.rest) - len(entries)) * size
    loads = (tokens[Tier.HOST] + tokens[Tier.DISK]) // size
    choice = Choice(found.held, found.rest, tokens, loads)
    if found.tail is not None:
        _choose_tail(choice, found.tail, found.tail_tokens, residency)
    return choice


def _choose_tail(choice: Choice, tail: Source, tail_tokens: int, residency: Residency) -> None:
    tier = tier_of(tail)
    if tier is Tier.DEVICE and choice.loads:
        # Its slots would wait to be written while others may want the block as it is.
        return
    in_place = (
        isinstance(tail, Entry)
        and tail.device is not None
        and tail.record.fill == tail_tokens
        and residency.device.num_leases(tail.device) == 0
    )
    choice.tail, choice.tail_tokens, choice.in_place = tail, tail_tokens, in_place
    choice.tokens[tier] += tail_tokens
    choice.loads += tier is not Tier.DEVICE


class Admitter:
    """Carries a choice out. Changes nothing unless all of it succeeds."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency

    def make_room(self, choice: Choice, *, room_tokens: int, most_blocks: int) -> bool:
        """Drop clean blocks for what :meth:`admit` is going to allocate, but no more than so many.

        Returns:
            Whether it may be asked now: it has at most so many to drop itself, or finds no room.
        """
        device, residency = self._residency.device, self._residency
        if self._num_fresh(choice, room_tokens) - device.num_free <= most_blocks:
            return True
        held = choice.blocks_in(Tier.DEVICE)
        device.lease_chain(held)  # what is matched is not what is to go
        residency.settle_fallen()
        victims = residency.clean_run(device, most_blocks)
        is_part = len(victims) == most_blocks
        if is_part:
            residency.evict_device(victims)
        device.release_chain(reversed(held))
        return not is_part

    def _num_fresh(self, choice: Choice, room_tokens: int) -> int:
        """Device blocks to allocate, room for the whole prompt included."""
        matched_blocks = choice.num_blocks + (choice.tail is not None)
        room_blocks = -(-room_tokens // self._residency.block_size) - matched_blocks
        return choice.fresh_blocks + max(room_blocks, 0)

    def admit(
        self,
        seq_id: int,
        chain: TokenChain,
        choice: Choice,
        *,
        disk_below: bool,
        room_tokens: int,
    ) -> tuple[RunningSequence, Admission] | None:
        """Hold and allocate; None when the device has no room now."""
        size = self._residency.block_size
        fresh = self._take_room(self._num_fresh(choice, room_tokens), choice)
        if fresh is None:
            return None
        found = sum(choice.tokens.values())
        there = len(choice.held) * size if choice.loads else found
        sequence = RunningSequence(
            seq_id, chain, choice.held[:], there, (there // size + 1) * size, disk_below
        )
        copies: tuple[BlockCopy, ...] = ()
        if choice.loads:
            sequence.gap = self._open_gap(sequence, choice, fresh, found)
        elif choice.tail is not None:
            copies = self._add_tail(sequence, choice.tail, choice, fresh)
        sequence.table.extend(fresh)
        return sequence, Admission(tuple(sequence.table), there, found, copies)

    def _take_room(self, count: int, choice: Choice) -> list[int] | None:
        """Hold what is matched on the device, then allocate ``count`` blocks among the others.

        Where that fails the holds end again. What is matched is then at the hot end of its tier: it
        is what a waiting sequence wants, and room is to be made from others.
        """
        device, host = self._residency.device, self._residency.host
        held = choice.blocks_in(Tier.DEVICE)
        device.lease_chain(held)
        fresh = self._residency.allocate_device(count)
        if fresh is None:
            device.release_chain(reversed(held))
            below = choice.blocks_in(Tier.HOST)
            host.lease_chain(below)
            host.release_chain(reversed(below))
        return fresh

    def _open_gap(
        self, sequence: RunningSequence, choice: Choice, fresh: list[int], end_tokens: int
    ) -> Gap:
        """What is not on the device gets a fresh block and may be loaded; sources are held."""
        table, start = sequence.table, len(sequence.table)
        sources: list[Source | None] = []
        for source in choice.rest if choice.tail is None else [*choice.rest, choice.tail]:
            if isinstance(source, Entry) and (block := source.device) is not None:
                table.append(block)
                sources.append(None)
            else:
                table.append(fresh.pop())
                sources.append(source)
        self._residency.host.lease_chain(choice.blocks_in(Tier.HOST))
        return Gap(
            sequence.seq_id,
            table,
            sources,
            start=start,
            end_tokens=end_tokens,
            block_size=self._residency.block_size,
        )

    def _add_tail(
        self, sequence: RunningSequence, tail: Source, choice: Choice, fresh: list[int]
    ) -> tuple[BlockCopy, ...]:
        """Continue a tail on the device where it is, or in a copy."""
        source, tokens = _device_block(tail), choice.tail_tokens
        if not choice.in_place:
            block = fresh.pop()
            sequence.table.append(block)
            sequence.copy_source = source
            return (BlockCopy(source, block, tokens),)
        self._residency.device.reopen(source)
        sequence.table.append(source)
        if tail.record.fill == tokens < self._residency.block_size:
            on_disk = isinstance(tail, Entry) and tail.on_disk
            sequence.tail_origin = TailOrigin(tail.record.key, tokens, source, on_disk)
        return ()


def _device_block(source: Source) -> int:
    if not isinstance(source, Entry) or source.device is None:
        raise TypeError(f"{source} is not on the device")
    return source.device
