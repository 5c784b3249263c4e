"""Finds the longest verified prefix of a chain over device, host and a receipt from disk.

Full blocks are followed hash by hash, each verified by parent and tokens. Past the last one the
children of that parent are compared token by token, and the longest partial match wins. Questions
only: nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from sessionkv.cache.chain import TokenChain
from sessionkv.cache.prefix_index import Entry, PrefixIndex, common_prefix
from sessionkv.cache.sequence import StagedBlock
from sessionkv.types import BlockHash, DiskBlock, DiskReceipt, Tier

Source = Entry | DiskBlock
"""Where a block is to be taken from."""


@dataclass(frozen=True, slots=True)
class Found:
    """A match in detail; valid while ``version`` is the residency's.

    Attributes:
        held: Device blocks of the leading full blocks.
        rest: Full blocks past them, the first of which is on a lower tier.
        lenders: Sequences that fill some of ``held`` in the plan being built.
        tail: Block of which only the first ``tail_tokens`` slots match, or None.
        disk_below: More of the chain may be on disk than was asked for.
        next_key: Hash of the first block not found that could be used whole.
    """

    version: int
    held: list[int] = field(default_factory=list)
    rest: list[Source] = field(default_factory=list)
    lenders: set[int] = field(default_factory=set)
    tail: Source | None = None
    tail_tokens: int = 0
    disk_below: bool = False
    next_key: BlockHash | None = None

    @property
    def num_blocks(self) -> int:
        """Full blocks matched."""
        return len(self.held) + len(self.rest)


def usable_blocks(chain: TokenChain) -> int:
    """Full blocks that may be matched: the last token of a prompt is always computed."""
    return max(len(chain) - 1, 0) // chain.block_size


def tier_of(source: Source) -> Tier:
    """The tier a block would be taken from."""
    return source.tier if isinstance(source, Entry) else Tier.DISK


def find(
    chain: TokenChain,
    index: PrefixIndex,
    *,
    staged: Mapping[BlockHash, StagedBlock],
    coming: tuple[Collection[BlockHash], ...],
    receipt: DiskReceipt | None,
    disk: bool,
    version: int,
) -> Found:
    """Longest verified prefix of ``chain``, at most all but its last token. O(blocks matched).

    Args:
        chain: The prompt.
        index: What memory holds.
        staged: Blocks that the plan being built will fill.
        coming: Keys that a transfer brings to the device or a sequence computes next; the prefix
            ends before such a block, also where a lower tier has it.
        receipt: What the store holds beyond memory.
        disk: Whether there is a disk tier.
        version: Kept in the result.
    """
    held = _device_run(chain, index)
    rest: list[Source] = [*_host_run(chain, len(held), index, (staged, *coming))]
    lenders: set[int] = set()
    on_disk = {block.record.key: block for block in receipt.blocks} if receipt else {}
    for source in _sources(chain, len(held) + len(rest), index.entries, (staged, on_disk)):
        if isinstance(source, StagedBlock):
            if rest:
                break
            held.append(source.block)
            lenders.add(source.seq_id)
        elif not rest and isinstance(source, Entry) and source.device is not None:
            held.append(source.device)
        elif tier_of(source) is not Tier.DEVICE and _is_in(source.record.key, coming):
            break
        else:
            rest.append(source)

    length = len(held) + len(rest)
    next_key = chain.hashes[length] if length < usable_blocks(chain) else None
    tail: Source | None = None
    tail_tokens = 0
    if next_key is None or not _is_in(next_key, coming):
        tail, tail_tokens = _tail(chain, length, index, receipt)
    return Found(
        version=version,
        held=held,
        rest=rest,
        lenders=lenders,
        tail=tail,
        tail_tokens=tail_tokens,
        disk_below=disk and _more_on_disk(chain, length, (index, staged), receipt),
        next_key=next_key,
    )


def _is_in(key: BlockHash, collections: tuple[Collection[BlockHash], ...]) -> bool:
    return any(key in keys for keys in collections)


def _device_run(chain: TokenChain, index: PrefixIndex) -> list[int]:
    """Device blocks of the leading full blocks: the usual whole of a match, in a tight loop."""
    usable = usable_blocks(chain)
    entry_of = index.entries.get
    run: list[int] = []
    for key, parent, tokens in zip(
        chain.hashes[:usable], chain.parents(usable), chain.block_tokens(usable), strict=False
    ):
        entry = entry_of(key)
        if entry is None or (block := entry.device) is None:
            break
        record = entry.record
        if record.token_ids != tokens or record.parent != parent:
            break
        run.append(block)
    return run


def _host_run(
    chain: TokenChain,
    start: int,
    index: PrefixIndex,
    elsewhere: tuple[Collection[BlockHash], ...],
) -> list[Entry]:
    """Full blocks from ``start`` on that are on the host alone, up to the first that is not.

    What is brought to the device by somebody is ``elsewhere`` too. The usual rest of a match, in a
    tight loop.
    """
    usable = usable_blocks(chain)
    entry_of = index.entries.get
    elsewhere = tuple(keys for keys in elsewhere if keys)
    run: list[Entry] = []
    for key, parent, tokens in zip(
        chain.hashes[start:usable],
        chain.parents(usable)[start:],
        chain.block_tokens(usable)[start:],
        strict=False,
    ):
        entry = entry_of(key)
        if entry is None or entry.device is not None:
            break
        record = entry.record
        if record.token_ids != tokens or record.parent != parent:
            break
        if elsewhere and _is_in(key, elsewhere):
            break
        run.append(entry)
    return run


def _sources(
    chain: TokenChain,
    start: int,
    entries: Mapping[BlockHash, Entry],
    places: tuple[Mapping[BlockHash, StagedBlock], Mapping[BlockHash, DiskBlock]],
) -> Iterator[Entry | StagedBlock | DiskBlock]:
    """Full blocks from ``start`` on, each verified: on the device, staged, on the host, on disk."""
    usable = usable_blocks(chain)
    tokens = chain.block_tokens(usable)
    staged, on_disk = places
    for block in range(start, usable):
        key = chain.hashes[block]
        entry = entries.get(key)
        source: Entry | StagedBlock | DiskBlock | None = entry
        if entry is None or entry.device is None:
            source = staged.get(key) or entry or on_disk.get(key)
        if source is None:
            return
        record = source.record
        if record.token_ids != tokens[block] or record.parent != chain.parent(block):
            return
        yield source


def _tail(
    chain: TokenChain, block: int, index: PrefixIndex, receipt: DiskReceipt | None
) -> tuple[Source | None, int]:
    """Best partial match past ``block`` full ones, from memory before disk where equal."""
    start = block * chain.block_size
    # Never the whole block: one that could be used whole is not a tail, and has been passed over.
    wanted = chain.token_ids[start : min(start + chain.block_size, len(chain)) - 1]
    if not wanted:
        return None, 0
    parent = chain.parent(block)
    best: tuple[Source | None, int] = index.best_child(parent, wanted) or (None, 0)
    if receipt and receipt.tail and receipt.tail.record.parent == parent:
        shared = common_prefix(receipt.tail.record.token_ids, wanted)
        if shared > best[1]:
            best = (receipt.tail, shared)
    return best


def _more_on_disk(
    chain: TokenChain,
    length: int,
    memory: tuple[PrefixIndex, Mapping[BlockHash, StagedBlock]],
    receipt: DiskReceipt | None,
) -> bool:
    """Whether the disk may reach further than the ``length`` blocks matched.

    Not where it was asked for the next one and lacks it. Otherwise memory knows for each block
    whether children of it may be on disk alone; of blocks that only the disk has, and at the start
    of a chain (or of a tenant's part of it), nothing is known.
    """
    if receipt is not None and length < usable_blocks(chain):
        return False
    if chain.starts_domain(length):
        return True
    index, staged = memory
    key = chain.hashes[length - 1]
    last = index.get(key) or staged.get(key)
    return last is None or last.disk_below
