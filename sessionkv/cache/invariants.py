"""Recounts everything from first principles and compares: for tests, and at idle in the engine.

Never repairs and never ends the process; what to do about a broken invariant is the caller's.
O(blocks).
"""

from __future__ import annotations

from collections import Counter

from sessionkv.cache.block_pool import BlockPool, BlockState
from sessionkv.cache.fetching import Fetcher
from sessionkv.cache.residency import Residency
from sessionkv.cache.running import RunningSet
from sessionkv.cache.sequence import RunningSequence
from sessionkv.cache.spilling import Spiller
from sessionkv.types import Tier


class InvariantBroken(AssertionError):
    """The cache's books do not agree with each other."""


def check_cache(
    residency: Residency, running: RunningSet, fetcher: Fetcher, spiller: Spiller
) -> None:
    """Check states, leases, index and sequences.

    Raises:
        InvariantBroken: With what disagrees.
    """
    _check_pool(residency.device)
    _check_pool(residency.host)
    _check_index(residency)
    _check_leases(residency, running, fetcher, spiller)
    for sequence in running:
        _check_sequence(residency, sequence)
    lent = {seq_id for sequence in running for seq_id in sequence.borrowers}
    _require(all(seq_id in running for seq_id in lent), "a borrower has ended", sorted(lent))
    fillers = {seq_id for seq_id in running.fillers.values() if seq_id not in running}
    _require(not fillers, "others would wait for ended sequences", sorted(fillers))


def _require(holds: bool, what: str, *details: object) -> None:
    if not holds:
        raise InvariantBroken(": ".join([what, *map(repr, details)]))


def _check_pool(pool: BlockPool) -> None:
    """I1: each block has one state, the counts are right and sum to the total."""
    states = Counter(pool.state(block) for block in range(pool.num_blocks))
    counted = (pool.num_free, pool.num_filling, pool.num_leased, pool.num_cached)
    order = (BlockState.FREE, BlockState.FILLING, BlockState.LEASED, BlockState.CACHED)
    expected = tuple(states[state] for state in order)
    _require(counted == expected, "counts by state differ", pool.tier, counted, expected)
    problems = pool.problems()
    _require(not problems, "the pool disagrees with itself", pool.tier, problems)


def _check_index(residency: Residency) -> None:
    """Index and pools name each other; every entry is somewhere; children are complete."""
    for pool, place in ((residency.device, "device"), (residency.host, "host")):
        named = sorted(
            (block, entry.record.key)
            for entry in residency.index
            if (block := getattr(entry, place)) is not None
        )
        held = [(b, key) for b in range(pool.num_blocks) if (key := pool.key(b)) is not None]
        _require(named == held, "index and pool name different blocks", pool.tier, named, held)
    for entry in residency.index:
        _require(
            entry.device is not None or entry.host is not None,
            "an entry is in no tier of memory",
            entry,
        )
        _require(
            entry in residency.index.children(entry.record.parent),
            "an entry is not among its parent's children",
            entry,
        )
        if entry.device is not None and entry.record.fill == residency.block_size:
            state = residency.device.state(entry.device)
            _require(state is not BlockState.FILLING, "a full block is written", entry)


def _check_leases(
    residency: Residency, running: RunningSet, fetcher: Fetcher, spiller: Spiller
) -> None:
    """Every lease has exactly one owner: a table, a copy-on-write, a gap, a load or a spill."""
    device: Counter[int] = Counter()
    host: Counter[int] = Counter()
    for sequence in running:
        device.update(sequence.table)
        if sequence.copy_source is not None:
            device[sequence.copy_source] += 1
        if sequence.gap is not None:
            host.update(sequence.gap.held())
    for gap, load in fetcher.loads():
        host.update([load.place] if load.source is Tier.HOST else [])
        device.update([] if gap.alive else [load.block])
    for load in fetcher.promised():
        host.update([load.place] if load.source is Tier.HOST else [])
        device.update([] if load.is_lost else [load.block])
    for transfer in spiller.transfers():
        sources = device if transfer.src is Tier.DEVICE else host
        sources.update(move.src for move in transfer.moves)
        if transfer.dst is Tier.HOST:
            host.update(move.dst for move in transfer.moves)
    for pool, owners in ((residency.device, device), (residency.host, host)):
        held = Counter({b: n for b in range(pool.num_blocks) if (n := pool.num_leases(b))})
        _require(held == owners, "leases and their owners differ", pool.tier, held, owners)


def _check_sequence(residency: Residency, sequence: RunningSequence) -> None:
    """A table has no block twice, holds what is committed, and writes only behind it."""
    size = residency.block_size
    table = sequence.table
    _require(len(set(table)) == len(table), "a block is in a table twice", sequence)
    _require(sequence.committed <= len(table) * size, "committed past the table", sequence)
    _require(sequence.committed < sequence.boundary, "boundary is behind", sequence)
    full, gap = sequence.committed // size, sequence.gap
    for position, block in enumerate(table):
        filling = residency.device.state(block) is BlockState.FILLING
        if gap is not None and position >= full and gap.is_there(position):
            load = gap.at(position)
            private = load is not None and load.private
            _require(filling == private, "a block of a gap is not as it should be", position)
            continue
        borrowed = position < full and bool(sequence.lenders)
        _require(
            filling == (position >= full) or borrowed,
            "a block is filling and should not be, or the reverse",
            position,
            sequence,
        )
