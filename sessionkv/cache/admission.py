"""From a match to a sequence with its first blocks: held, copied on write, or being fetched.

=========  =========================  ======================================
source     full block                 block matched in its first k slots
=========  =========================  ======================================
device     held                       continued in place if it ends there and
                                      nobody holds it, else copied
host       fetched, published         fetched, private
disk       fetched, published         fetched, private
=========  =========================  ======================================
"""

from __future__ import annotations

from dataclasses import dataclass

from sessionkv.cache.chain import TokenChain
from sessionkv.cache.fetching import Fetcher, Load
from sessionkv.cache.matching import Found, Source, tier_of
from sessionkv.cache.prefix_index import Entry
from sessionkv.cache.residency import Residency
from sessionkv.cache.sequence import RunningSequence, TailOrigin
from sessionkv.types import Admission, BlockCopy, DiskBlock, Tier, Transfer


@dataclass(slots=True)
class Choice:
    """What of a match is used.

    Attributes:
        held: Device blocks of the leading full blocks.
        rest: Full blocks past them, in order.
        tail: Block whose first ``tail_tokens`` slots are used, or None.
        tokens: How many tokens come from each tier, the tail's among them.
        loads: How many blocks come from a lower tier, the tail included.
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
        """Blocks in DEVICE or HOST to take content from, in order of the chain."""
        sources = self.rest if self.tail is None else [*self.rest, self.tail]
        found = self.held[:] if tier is Tier.DEVICE else []
        for source in sources:
            if isinstance(source, Entry) and source.tier is tier:
                block = source.device if tier is Tier.DEVICE else source.host
                found += [] if block is None else [block]
        return found


def choose(found: Found, residency: Residency, *, use_host: bool, use_disk: bool) -> Choice:
    """Cut a match at the first block of a tier that is not to be used. A question."""
    size = residency.block_size
    refused = {tier for tier, used in ((Tier.HOST, use_host), (Tier.DISK, use_disk)) if not used}
    tokens = dict.fromkeys(Tier, 0)
    tokens[Tier.DEVICE] = len(found.held) * size
    length = 0
    for source in found.rest:
        tier = tier_of(source)
        if tier in refused:
            break
        tokens[tier] += size
        length += 1
    loads = (tokens[Tier.HOST] + tokens[Tier.DISK]) // size
    choice = Choice(found.held, found.rest[:length], tokens, loads)
    tail = found.tail
    if tail is not None and length == len(found.rest) and tier_of(tail) not in refused:
        _choose_tail(choice, tail, found.tail_tokens, residency)
    return choice


def _choose_tail(choice: Choice, tail: Source, tail_tokens: int, residency: Residency) -> None:
    tier = tier_of(tail)
    in_place = (
        isinstance(tail, Entry)
        and tail.device is not None
        and tail.record.fill == tail_tokens
        and residency.device.num_leases(tail.device) == 0
    )
    if tier is Tier.DEVICE and not in_place and choice.loads:
        # A fetch may fail and shorten the table, and the copy would then be into a freed block.
        return
    choice.tail, choice.tail_tokens, choice.in_place = tail, tail_tokens, in_place
    choice.tokens[tier] += tail_tokens
    choice.loads += tier is not Tier.DEVICE


class Admitter:
    """Carries a choice out. Changes nothing unless all of it succeeds."""

    def __init__(self, residency: Residency, fetcher: Fetcher) -> None:
        self._residency = residency
        self._fetcher = fetcher

    def admit(
        self,
        seq_id: int,
        chain: TokenChain,
        choice: Choice,
        *,
        disk_below: bool,
        room_tokens: int,
    ) -> tuple[RunningSequence, Admission] | None:
        """Hold, allocate and start fetching; None when the device has no room now."""
        size = self._residency.block_size
        matched_blocks = choice.num_blocks + (choice.tail is not None)
        room_blocks = max(-(-room_tokens // size) - matched_blocks, 0)
        fresh = self._take_room(choice.fresh_blocks + room_blocks, choice)
        if fresh is None:
            return None
        cached = sum(choice.tokens.values())
        sequence = RunningSequence(
            seq_id, chain, choice.held[:], cached, (cached // size + 1) * size, disk_below
        )
        loads = self._fill_table(sequence, choice, fresh)
        copies = self._add_tail(sequence, choice, fresh, loads)
        sequence.table.extend(fresh)
        transfers: tuple[Transfer, ...] = ()
        if loads:
            sequence.fetch, transfers = self._fetcher.start(seq_id, loads)
        return sequence, Admission(
            block_ids=tuple(sequence.table),
            cached_tokens=cached,
            device_tokens=choice.tokens[Tier.DEVICE],
            host_tokens=choice.tokens[Tier.HOST],
            disk_tokens=choice.tokens[Tier.DISK],
            copies=copies,
            transfers=transfers,
        )

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

    def _fill_table(
        self, sequence: RunningSequence, choice: Choice, fresh: list[int]
    ) -> list[Load]:
        """What is not on the device gets a fresh block and a load."""
        size = self._residency.block_size
        loads: list[Load] = []
        table = sequence.table
        for source in choice.rest:
            block = source.device if isinstance(source, Entry) else None
            if block is None:
                block = fresh.pop()
                loads.append(_load(len(table), source, block, tokens=size, private=False))
            table.append(block)
        return loads

    def _add_tail(
        self,
        sequence: RunningSequence,
        choice: Choice,
        fresh: list[int],
        loads: list[Load],
    ) -> tuple[BlockCopy, ...]:
        tail = choice.tail
        if tail is None:
            return ()
        tokens = choice.tail_tokens
        source = tail.device if isinstance(tail, Entry) else None
        if choice.in_place and source is not None:
            self._residency.device.reopen(source)
            block = source
        else:
            block = fresh.pop()
        position = len(sequence.table)
        sequence.table.append(block)
        whole = tail.record.fill == tokens < self._residency.block_size
        if source is None:
            loads.append(_load(position, tail, block, tokens=tokens, private=True))
        if whole and (source is None or choice.in_place):
            on_disk = isinstance(tail, DiskBlock) or tail.on_disk
            sequence.tail_origin = TailOrigin(tail.record.key, tokens, block, on_disk)
        if source is None or choice.in_place:
            return ()
        sequence.copy_source = source
        return (BlockCopy(source, block, tokens),)


def _load(position: int, source: Source, block: int, *, tokens: int, private: bool) -> Load:
    if isinstance(source, DiskBlock):
        return Load(position, source.record, block, Tier.DISK, source.slot, tokens, private)
    if source.host is None:
        raise TypeError(f"{source} is in no tier to load from")
    return Load(
        position, source.record, block, Tier.HOST, source.host, tokens, private, entry=source
    )
