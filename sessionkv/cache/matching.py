"""Finds the longest verified prefix of a chain over device, host and a receipt from disk.

Full blocks are followed hash by hash, each verified by parent and tokens. Past the last one the
children of that parent are compared token by token, and the longest partial match wins. Questions
only: nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sessionkv.cache.chain import TokenChain
from sessionkv.cache.prefix_index import Entry, PrefixIndex, common_prefix
from sessionkv.cache.sequence import StagedBlock
from sessionkv.types import BlockHash, DiskBlock, DiskReceipt, Tier

Source = Entry | StagedBlock | DiskBlock


@dataclass(frozen=True, slots=True)
class Found:
    """A match in detail; valid while ``version`` is the residency's.

    Attributes:
        sources: Where each full block of the prefix is to be taken from.
        tail: Block of which only the first ``tail_tokens`` slots match, or None.
        disk_below: More of the chain may be on disk than was asked for.
        next_key: Hash of the first block not found that could be used whole.
    """

    version: int
    sources: list[Source]
    tail: Source | None
    tail_tokens: int
    disk_below: bool
    next_key: BlockHash | None


def usable_blocks(chain: TokenChain) -> int:
    """Full blocks that may be matched: the last token of a prompt is always computed."""
    return max(len(chain) - 1, 0) // chain.block_size


def tier_of(source: Source) -> Tier:
    """The tier a block would be taken from."""
    if isinstance(source, Entry):
        return source.tier
    return Tier.DEVICE if isinstance(source, StagedBlock) else Tier.DISK


def nothing(version: int, *, disk: bool) -> Found:
    """A match of no tokens, made without looking."""
    return Found(version, [], None, 0, disk_below=disk, next_key=None)


def find(
    chain: TokenChain,
    index: PrefixIndex,
    *,
    staged: Mapping[BlockHash, StagedBlock],
    in_flight: Collection[BlockHash],
    receipt: DiskReceipt | None,
    disk: bool,
    version: int,
) -> Found:
    """Longest verified prefix of ``chain``, at most all but its last token. O(blocks matched).

    Args:
        chain: The prompt.
        index: What memory holds.
        staged: Blocks that the plan being built will fill.
        in_flight: Keys on their way to the device; the prefix ends before such a block.
        receipt: What the store holds beyond memory.
        disk: Whether there is a disk tier.
        version: Kept in the result.
    """
    usable = usable_blocks(chain)
    on_disk = {block.record.key: block for block in receipt.blocks} if receipt else {}
    sources = _full_blocks(chain, usable, (index.entries, staged, on_disk), in_flight)
    length = len(sources)
    next_key = chain.hashes[length] if length < usable else None
    tail: Source | None = None
    tail_tokens = 0
    if next_key is None or next_key not in in_flight:
        tail, tail_tokens = _tail(chain, length, index, receipt)
    return Found(
        version=version,
        sources=sources,
        tail=tail,
        tail_tokens=tail_tokens,
        disk_below=disk and receipt is None and _more_on_disk(chain, sources),
        next_key=next_key,
    )


def _full_blocks(
    chain: TokenChain,
    usable: int,
    places: tuple[Mapping[BlockHash, Source], ...],
    in_flight: Collection[BlockHash],
) -> list[Source]:
    """Verified sources of the leading blocks; of several places the first that has a block."""
    memory, staged, on_disk = places
    sources: list[Source] = []
    tokens = chain.block_tokens(usable)
    parent_of = chain.parent
    for block, key in enumerate(chain.hashes[:usable]):
        source = memory.get(key) or staged.get(key) or on_disk.get(key)
        if source is None:
            break
        record = source.record
        if record.token_ids != tokens[block] or record.parent != parent_of(block):
            break
        if in_flight and key in in_flight and tier_of(source) is not Tier.DEVICE:
            break
        sources.append(source)
    return sources


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


def _more_on_disk(chain: TokenChain, sources: list[Source]) -> bool:
    """Whether the disk may reach further than memory does.

    Memory knows for each block whether children of it may be on disk alone; at the start of a
    chain (or of a tenant's part of it) nothing is known.
    """
    if chain.starts_domain(len(sources)):
        return True
    last = sources[-1]
    return not isinstance(last, DiskBlock) and last.disk_below
