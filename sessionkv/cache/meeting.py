"""Moves the front of a sequence with a gap: over what it computed, and over what has arrived.

A table only grows and a front only rises. Blocks that computing passed unclaimed give their source
back; blocks that have arrived join as soon as the front stands before them.
"""

from __future__ import annotations

from collections.abc import Iterable

from sessionkv.cache.gap import Gap, Load
from sessionkv.cache.prefix_index import Entry
from sessionkv.cache.residency import Residency
from sessionkv.cache.sequence import RunningSequence, TailOrigin
from sessionkv.types import Meeting, Tier


def advance(sequence: RunningSequence, gap: Gap, residency: Residency) -> Meeting:
    """Bring the front up to date; the gap ends with the last of its positions. O(blocks passed)."""
    size = residency.block_size
    pass_computed(sequence, gap, residency)
    before = gap.front
    # Behind a block that is only begun nothing joins yet.
    run = gap.there() if sequence.committed == gap.front * size else []
    joined = _tokens_by_tier(run, size)
    gap.front += len(run)
    sequence.committed += sum(tokens for _, tokens in joined)
    if run and (last := run[-1]) is not None and last.private:
        _continue_tail(sequence, last, residency)
    if joined:
        sequence.boundary = (sequence.committed // size + 1) * size
        _count_hits(sequence, min(gap.front, sequence.committed // size) - before, residency)
    if gap.front >= gap.stop:
        sequence.gap = None
        return Meeting(sequence.committed, tuple(joined), gap.end_tokens, over=True)
    limit = gap.limit()
    return Meeting(
        front_tokens=sequence.committed,
        joined=tuple(joined),
        end_tokens=gap.end_tokens,
        limit_tokens=None if limit is None else limit * size,
        unclaimed=gap.unclaimed,
        loading=gap.loading,
    )


def _tokens_by_tier(run: Iterable[Load | None], size: int) -> list[tuple[Tier, int]]:
    """Tokens of blocks in order, with the tier they came from: DEVICE where nothing was loaded."""
    joined: list[tuple[Tier, int]] = []
    tier, tokens = Tier.DEVICE, 0
    for load in run:
        source = Tier.DEVICE if load is None else load.source
        if source is not tier:
            joined.append((tier, tokens))
            tier, tokens = source, 0
        tokens += size if load is None else load.tokens
    joined.append((tier, tokens))
    return [(tier, tokens) for tier, tokens in joined if tokens]


def pass_computed(sequence: RunningSequence, gap: Gap, residency: Residency) -> None:
    """The front passes what the sequence has computed, begun blocks as well."""
    computed = min(-(-sequence.committed // residency.block_size), gap.stop)
    for source, place in gap.unclaimed_between(gap.front, computed):
        if isinstance(source, Entry):
            residency.host.release(place)
        elif (entry := residency.index.get(source.record.key)) is not None:
            entry.on_disk = True  # as it was found there: it need not be written again
    gap.front = max(gap.front, computed)


def abandon(sequence: RunningSequence, gap: Gap, residency: Residency) -> None:
    """The sequence ends: nothing more is claimed, and what arrives is not waited for."""
    pass_computed(sequence, gap, residency)
    gap.alive = False
    residency.host.release_chain(gap.held())


def _continue_tail(sequence: RunningSequence, load: Load, residency: Residency) -> None:
    """The sequence goes on in the block of a tail; used whole, that is the tail's longer self."""
    if load.record.fill == load.tokens < residency.block_size:
        on_disk = load.source is Tier.DISK or (load.entry is not None and load.entry.on_disk)
        sequence.tail_origin = TailOrigin(load.record.key, load.tokens, load.block, on_disk)


def _count_hits(sequence: RunningSequence, num_blocks: int, residency: Residency) -> None:
    """Blocks found and not computed; a sequence that came back looks nothing up."""
    if sequence.settled:
        residency.counters.hit += num_blocks if sequence.looked_up else 0
    else:
        sequence.hit += num_blocks if sequence.looked_up else 0
