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

from dataclasses import dataclass, field

from sessionkv.cache.chain import TokenChain
from sessionkv.cache.fetching import Fetcher, Load
from sessionkv.cache.matching import Found, Source, tier_of
from sessionkv.cache.prefix_index import Entry
from sessionkv.cache.residency import Residency
from sessionkv.cache.sequence import RunningSequence, StagedBlock, TailOrigin
from sessionkv.types import Admission, BlockCopy, DiskBlock, Tier, Transfer


@dataclass(slots=True)
class Choice:
    """What of a match is used.

    Attributes:
        sources: Full blocks, in order.
        tail: Block whose first ``tail_tokens`` slots are used, or None.
        loads: How many of them come from a lower tier, the tail included.
        in_place: The tail is continued where it is.
    """

    sources: list[Source]
    tail: Source | None
    tail_tokens: int
    loads: int
    in_place: bool
    tokens: dict[Tier, int] = field(default_factory=dict)

    @property
    def fresh_blocks(self) -> int:
        """Device blocks to allocate."""
        copied = self.tail is not None and not self.in_place and tier_of(self.tail) is Tier.DEVICE
        return self.loads + copied


def choose(found: Found, residency: Residency, *, use_host: bool, use_disk: bool) -> Choice:
    """Cut a match at the first block of a tier that is not to be used. A question."""
    size = residency.block_size
    refused = {tier for tier, used in ((Tier.HOST, use_host), (Tier.DISK, use_disk)) if not used}
    tokens = dict.fromkeys(Tier, 0)
    length = 0
    for source in found.sources:
        tier = tier_of(source)
        if tier in refused:
            break
        tokens[tier] += size
        length += 1
    loads = (tokens[Tier.HOST] + tokens[Tier.DISK]) // size
    choice = Choice(found.sources[:length], None, 0, loads, in_place=False, tokens=tokens)
    tail = found.tail
    if tail is not None and length == len(found.sources) and tier_of(tail) not in refused:
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
        matched_blocks = len(choice.sources) + (choice.tail is not None)
        room_blocks = max(-(-room_tokens // size) - matched_blocks, 0)
        fresh = self._take_room(choice.fresh_blocks + room_blocks, choice)
        if fresh is None:
            return None
        cached = sum(choice.tokens.values())
        sequence = RunningSequence(
            seq_id, chain, [], cached, (cached // size + 1) * size, disk_below
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
        held = _device_blocks(choice)
        for block in held:
            device.lease(block)
        fresh = self._residency.allocate_device(count)
        if fresh is None:
            device.release_chain(reversed(held))
            for block in reversed(_host_blocks(choice)):
                host.lease(block)
                host.release(block)
        return fresh

    def _fill_table(
        self, sequence: RunningSequence, choice: Choice, fresh: list[int]
    ) -> list[Load]:
        """Blocks held go in as they are, others get a fresh block and a load."""
        size = self._residency.block_size
        loads: list[Load] = []
        table = sequence.table
        for source in choice.sources:
            block = _device_block(source)
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
        source = _device_block(tail)
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
            on_disk = isinstance(tail, DiskBlock) or (isinstance(tail, Entry) and tail.on_disk)
            sequence.tail_origin = TailOrigin(tail.record.key, tokens, block, on_disk)
        if source is None or choice.in_place:
            return ()
        sequence.copy_source = source
        return (BlockCopy(source, block, tokens),)


def lenders(choice: Choice) -> set[int]:
    """Sequences whose staged blocks are used."""
    return {source.seq_id for source in choice.sources if isinstance(source, StagedBlock)}


def _device_blocks(choice: Choice) -> list[int]:
    """Device blocks to hold, in order of the chain."""
    return [block for source in _used(choice) if (block := _device_block(source)) is not None]


def _host_blocks(choice: Choice) -> list[int]:
    """Host blocks to read, in order of the chain."""
    return [
        source.host
        for source in _used(choice)
        if isinstance(source, Entry) and source.device is None and source.host is not None
    ]


def _used(choice: Choice) -> list[Source]:
    return choice.sources if choice.tail is None else [*choice.sources, choice.tail]


def _device_block(source: Source) -> int | None:
    if isinstance(source, Entry):
        return source.device
    return source.block if isinstance(source, StagedBlock) else None


def _load(position: int, source: Source, block: int, *, tokens: int, private: bool) -> Load:
    if isinstance(source, DiskBlock):
        return Load(position, source.record, block, Tier.DISK, source.slot, tokens, private)
    if not isinstance(source, Entry) or source.host is None:
        raise TypeError(f"{source} is in no tier to load from")
    return Load(
        position, source.record, block, Tier.HOST, source.host, tokens, private, entry=source
    )
