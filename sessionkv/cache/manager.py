"""The KV cache as the scheduler sees it: matches, leases and block tables of running sequences.

Ties the parts together: :class:`Residency` (which content is where), :func:`matching.find` (what a
chain may reuse), :class:`Admitter` (first blocks), :class:`RunningSet` (steps and ends),
:class:`Fetcher` (moves up) and :class:`Spiller` (moves down). Decides over ids only; touches no
bytes, waits for nothing, keeps no time. One thread.

Block ids of a table do not change and tables only grow, until ``finish`` or ``preempt`` ends them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from sessionkv.cache import matching
from sessionkv.cache.admission import Admitter, choose
from sessionkv.cache.block_pool import LeaseError
from sessionkv.cache.chain import TokenChain
from sessionkv.cache.fetching import Fetcher
from sessionkv.cache.ghosts import Ghosts
from sessionkv.cache.invariants import check_cache
from sessionkv.cache.ledger import CacheUsage, Ledger
from sessionkv.cache.matching import Found
from sessionkv.cache.meeting import advance
from sessionkv.cache.residency import Residency
from sessionkv.cache.retention_view import UNRETAINED, RetentionView
from sessionkv.cache.running import RunningSet
from sessionkv.cache.spilling import Spiller
from sessionkv.types import (
    Admission,
    BlockHash,
    DiskQuery,
    DiskReceipt,
    Fetched,
    Match,
    Meeting,
    Tier,
    Transfer,
    TransferResult,
)

CLEAN_AHEAD_BLOCKS = 16
"""Blocks kept free or clean ahead of need at least, if that is no more than an eighth of the device
and half of the host; more where more are taken at once."""
MAX_PREEMPTED = 1024
"""Preempted sequences remembered, so that their return does not count as a look-up."""


class KVCacheManager:
    """The ``KVCache`` of the scheduler, and what the engine asks besides.

    Args:
        root: :meth:`KVIdentity.root_hash`; chains of another root are refused.
        block_size: Tokens a block.
        num_device_blocks: Blocks of the runner's pool.
        num_host_blocks: Blocks of the host arena; 0 turns the host tier off.
        disk: Whether there is a disk tier.
        spill_to_disk: Whether blocks are written to it before they leave memory; else only those
            that are asked for are.
        prefix_cache: Off: nothing is matched, and blocks are freed when their sequence ends.
        retention: Order in which sessions want blocks kept; None is plain LRU.
        clean_ahead_blocks: See :data:`CLEAN_AHEAD_BLOCKS`.
    """

    def __init__(
        self,
        root: BlockHash,
        *,
        block_size: int,
        num_device_blocks: int,
        num_host_blocks: int,
        disk: bool,
        spill_to_disk: bool = True,
        prefix_cache: bool = True,
        retention: RetentionView | None = None,
        clean_ahead_blocks: int = CLEAN_AHEAD_BLOCKS,
    ) -> None:
        self.root = root
        self.block_size = block_size
        self.num_blocks = num_device_blocks
        self._prefix_cache = prefix_cache
        self._residency = Residency(
            block_size,
            num_device_blocks=num_device_blocks,
            num_host_blocks=num_host_blocks,
            disk=disk,
            spill_to_disk=spill_to_disk,
            retention=retention,
        )
        clean_ahead = min(clean_ahead_blocks, num_device_blocks // 8)
        if num_host_blocks:
            clean_ahead = min(clean_ahead, num_host_blocks // 2)
        transfer_ids = itertools.count(1)
        self._fetcher = Fetcher(self._residency, transfer_ids)
        self._spiller = Spiller(self._residency, transfer_ids, clean_ahead_blocks=clean_ahead)
        self._admitter = Admitter(self._residency)
        self._running = RunningSet(self._residency, self._fetcher, keep_blocks=prefix_cache)
        self._preempted: dict[int, None] = {}

    # -- matching

    def match(self, chain: object, receipt: DiskReceipt | None = None) -> Match:
        """Longest verified prefix. A question: changes nothing. O(blocks matched)."""
        chain = self._own(chain)
        found = self._find(chain, receipt)
        choice = choose(found, self._residency)
        key = found.next_key
        load = None if key is None else self._fetcher.in_flight.get(key)
        return Match(
            device_tokens=choice.tokens[Tier.DEVICE],
            host_tokens=choice.tokens[Tier.HOST],
            disk_tokens=choice.tokens[Tier.DISK],
            waits_for=None if key is None else self._running.fillers.get(key),
            waits_for_transfer=None if load is None else load.transfer_id,
            moved_down_at=self._moved_down_at(chain, found),
            state=found,
        )

    def _moved_down_at(self, chain: TokenChain, found: Found) -> int:
        """When what follows a match went from memory to disk, or a tail that may be part of it."""
        moved = self._residency.moved_down
        length = found.num_blocks
        if not moved or length * self.block_size + found.tail_tokens >= len(chain) - 1:
            return 0
        block = 0 if found.next_key is None else moved.get(found.next_key, 0)
        return max(block, moved.get(chain.parent(length), 0))

    def disk_query(self, chain: object) -> DiskQuery | None:
        """What to ask the store.

        None when disk is off, when memory holds the whole chain, or when memory knows that the
        disk has no more of it.
        """
        chain = self._own(chain)
        if not self._residency.disk:
            return None
        found = self._find(chain, None)
        length = found.num_blocks
        start = length * self.block_size
        if start + found.tail_tokens >= len(chain) - 1:
            return None
        if not found.disk_below and not self._moved_down_at(chain, found):
            return None
        keys = tuple(chain.hashes[length : matching.usable_blocks(chain)])
        return DiskQuery(
            keys=keys,
            parent=chain.parent(length),
            token_ids=tuple(chain.token_ids[start:]),
            first_token=start,
            in_memory=frozenset(self._residency.index.entries.keys() & keys),
            num_moves=self._residency.num_moves,
        )

    def _find(self, chain: TokenChain, receipt: DiskReceipt | None) -> Found:
        if not self._prefix_cache:
            return Found(self._residency.version)
        return matching.find(
            chain,
            self._residency.index,
            staged=self._running.staged,
            coming=(self._fetcher.in_flight.keys(), self._running.fillers.keys()),
            receipt=receipt,
            disk=self._residency.disk,
            version=self._residency.version,
        )

    def _own(self, chain: object) -> TokenChain:
        if not isinstance(chain, TokenChain):
            raise TypeError(f"a TokenChain is needed, not {type(chain).__name__}")
        if chain.root != self.root or chain.block_size != self.block_size:
            raise ValueError("the chain is of another KV identity or block size")
        return chain

    # -- admission

    def make_room(self, chain: object, match: Match, *, room_tokens: int, most_blocks: int) -> bool:
        """Drop what :meth:`admit` of a match needs the room of, but no more than so many blocks.

        Room for a long history is made bit by bit so that nobody else waits for all of it.

        Returns:
            Whether to admit now, the match being good still. Otherwise so many were dropped, more
            are to be, and the chain is to be matched again; nothing is held meanwhile.

        Raises:
            LeaseError: The cache has changed since the match.
        """
        self._own(chain)
        choice = choose(self._found(match), self._residency)
        return self._admitter.make_room(choice, room_tokens=room_tokens, most_blocks=most_blocks)

    def admit(
        self,
        seq_id: int,
        chain: object,
        match: Match,
        *,
        room_tokens: int = 0,
    ) -> Admission | None:
        """Lease what the match offers and allocate room for loads and the tail's copy.

        ``room_tokens`` is as for :meth:`reserve`, all or nothing with the rest. None when the
        device has no room now: nothing was changed except that the blocks wanted go later than
        before, and the shortfall is noted.

        Raises:
            LeaseError: The sequence runs already, or the cache has changed since the match.
        """
        chain = self._own(chain)
        if seq_id in self._running:
            raise LeaseError(f"sequence {seq_id} runs already")
        found = self._found(match)
        choice = choose(found, self._residency)
        admitted = self._admitter.admit(
            seq_id, chain, choice, disk_below=found.disk_below, room_tokens=room_tokens
        )
        if admitted is None:
            return None
        sequence, admission = admitted
        self._running.add(sequence, found.lenders)
        if seq_id in self._preempted:
            del self._preempted[seq_id]
        else:
            sequence.looked_up = matching.usable_blocks(chain)
            sequence.hit = len(choice.held)
            self._note_wanted(chain, found)
        return admission

    def _note_wanted(self, chain: TokenChain, found: Found) -> None:
        """Count what larger tiers would have had. Free where all is on the device. O(missing)."""
        ghosts, get = self._residency.ghosts, self._residency.index.get
        if not any(ghosts.values()):
            return
        missing = chain.hashes[len(found.held) : matching.usable_blocks(chain)]
        entries = [(key, get(key)) for key in missing]
        off_device = [(key, e) for key, e in entries if e is None or e.device is None]
        off_memory = [key for key, e in off_device if e is None or e.host is None]
        ghosts[Tier.DEVICE].look_up(key for key, _ in off_device)
        ghosts[Tier.HOST].look_up(off_memory)
        on_disk = {source.record.key for source in found.rest}
        ghosts[Tier.DISK].look_up(key for key in off_memory if key not in on_disk)

    def _found(self, match: Match) -> Found:
        """What a match stands for; one of nothing needs no look-up before it."""
        found = match.state
        if found is None and match.num_tokens == 0:
            return Found(self._residency.version, disk_below=self._residency.disk)
        if not isinstance(found, Found) or found.version != self._residency.version:
            raise LeaseError("the cache has changed since the match was made")
        return found

    def reserve(self, seq_id: int, num_tokens: int) -> tuple[int, ...] | None:
        """Grow the table to hold ``num_tokens`` positions; ids of the blocks added."""
        table = self._running.get(seq_id).table
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing <= 0:
            return ()
        blocks = self._residency.allocate_device(missing)
        if blocks is None:
            return None
        table.extend(blocks)
        return tuple(blocks)

    def block_table(self, seq_id: int) -> Sequence[int]:
        """The sequence's table; a view, not to be changed."""
        return self._running.get(seq_id).table

    # -- two cursors

    def advance(self, seq_id: int) -> Meeting:
        """Join what has arrived before the front, and say where the two cursors stand.

        O(blocks passed). To be asked between steps.
        """
        sequence = self._running.get(seq_id)
        if sequence.gap is None:
            return Meeting(sequence.committed, end_tokens=sequence.committed, over=True)
        meeting = advance(sequence, sequence.gap, self._residency)
        self._running.move_frontier(sequence)
        return meeting

    def claim(self, seq_id: int, wanted: Mapping[Tier, int]) -> tuple[Transfer, ...]:
        """Take so many of a tier's unclaimed blocks, from the back, to be loaded."""
        gap = self._running.get(seq_id).gap
        return () if gap is None else self._fetcher.claim(gap, wanted)

    # -- steps

    def stage(self, seq_id: int, num_tokens: int) -> None:
        """The plan being built will write positions below ``num_tokens``. O(blocks completed)."""
        sequence = self._running.get(seq_id)
        if num_tokens >= sequence.boundary:
            self._running.stage(sequence, num_tokens)

    def unstage(self) -> None:
        """The plan is executed or dropped: what is staged and not committed is not matchable."""
        self._running.unstage()

    def commit(self, seq_id: int, num_tokens: int) -> None:
        """Positions below ``num_tokens`` are written and may be matched. O(blocks completed).

        Raises:
            LeaseError: The sequence is not running, read blocks of one that ended without
                committing them, or has loads under way to blocks below ``num_tokens``.
        """
        sequence = self._running.get(seq_id)
        if sequence.settled and sequence.committed <= num_tokens < sequence.boundary:
            sequence.committed = num_tokens
        else:
            self._running.commit(sequence, num_tokens)

    def dependents(self, seq_id: int) -> tuple[int, ...]:
        """Sequences that lease blocks ``seq_id`` staged and has not committed, transitively."""
        return self._running.dependents(self._running.get(seq_id))

    def finish(self, seq_id: int, keep_tokens: int | None = None) -> None:
        """End the sequence's leases; right at any moment, with fetches in flight or none.

        Raises:
            LeaseError: The sequence is not running: it was ended before.
        """
        self._running.end(self._running.get(seq_id), keep_tokens, demote=False)

    def preempt(self, seq_id: int) -> None:
        """As :meth:`finish`, and its blocks are next to be demoted."""
        self._running.end(self._running.get(seq_id), None, demote=True)
        self._preempted[seq_id] = None
        if len(self._preempted) > MAX_PREEMPTED:
            del self._preempted[next(iter(self._preempted))]

    # -- transfers

    def plan_transfers(self) -> list[Transfer]:
        """Spills that make room for noted shortfalls, keep clean blocks ahead, and idle writing."""
        self._residency.settle_fallen()
        return self._spiller.plan() if self._prefix_cache else []

    def overdue(self, now: float) -> tuple[int, ...]:
        """Transfers down whose tier counts as refusing from now on, as it answers nothing.

        Nobody is to wait for them; until its next answer the tier is offered nothing, and blocks
        that only it could hold may be dropped. To be asked often; O(transfers down).
        """
        return self._spiller.overdue(now)

    @property
    def silent_tiers(self) -> frozenset[Tier]:
        """Tiers that count as refusing since :meth:`overdue` said so."""
        return frozenset(self._residency.silence.tiers)

    def transfers_of(self, seq_id: int) -> set[int]:
        """Transfers that bring blocks to a running sequence, neither promised nor answered."""
        return self._fetcher.transfers_of(seq_id)

    def promise_transfer(self, result: TransferResult) -> Fetched | None:
        """Take in what a load is going to be answered with, as its answer; which follows.

        All steps and copies to come must be behind its copies. Its blocks at both ends stay held
        until :meth:`finish_transfer`.

        Raises:
            KeyError: No such load is in flight, or it was promised.
        """
        return self._fetcher.promise(result)

    def finish_transfer(self, result: TransferResult) -> Fetched | None:
        """Take in a mover's answer; not None for a load of a running sequence.

        Of a load that was promised it only ends the leases.

        Raises:
            LeaseError: No such transfer is in flight.
        """
        if result.transfer_id in self._spiller:
            self._spiller.finish(result)
            return None
        if result.transfer_id not in self._fetcher:
            raise LeaseError(f"transfer {result.transfer_id} is not in flight")
        return self._fetcher.finish(result)

    def take_freed(self) -> tuple[int, ...]:
        """Device blocks that became free since the last call and still are."""
        return self._residency.device.take_freed()

    # -- disk and durability

    def request_clean(self, keys: Iterable[BlockHash]) -> None:
        """Write these blocks to disk soon, oldest request first; full blocks and tails alike."""
        self._spiller.request(keys)

    def dirty_count(self) -> int:
        """Blocks asked to be on disk, or on their way, that have not arrived; 0 ends a flush."""
        return self._spiller.dirty_count

    def request_retained(self) -> None:
        """Ask for every block that sessions want and the disk lacks, the most wanted first.

        O(blocks). Of one rank those known longest come first: the start of a history before its
        end.
        """
        ranks = self._retained_dirty()
        self._spiller.request(sorted(ranks, key=ranks.__getitem__, reverse=True))

    def num_retained_dirty(self) -> int:
        """Blocks that sessions want and the disk lacks; 0 where there is no disk. O(blocks)."""
        return len(self._retained_dirty()) if self._residency.disk else 0

    def _retained_dirty(self) -> dict[BlockHash, int]:
        """Each with its rank, those known longest first."""
        rank = self._residency.highest_rank
        dirty = [e.record.key for e in self._residency.index if not e.on_disk]
        return {key: found for key in dirty if (found := rank(key)) > UNRETAINED}

    def drop_requests(self) -> None:
        """Start no more of the writes that were asked for."""
        self._spiller.drop_requests()

    def any_unwritten(self, keys: Iterable[BlockHash]) -> bool:
        """Whether one of the blocks waits to be written, or is on its way. O(keys)."""
        return self._spiller.any_unwritten(keys)

    def on_disk_evicted(self, keys: Iterable[BlockHash]) -> None:
        """The store dropped these records to make room."""
        for key in (dropped := tuple(keys)):
            self._residency.disk_evicted(key)
        self._spiller.disk_evicted(dropped)

    def on_disk_lost(self) -> None:
        """Somebody took the files away: every record that was on disk is gone."""
        self._residency.lose_all_on_disk()
        self._spiller.disk_lost()

    def take_stale(self) -> tuple[BlockHash, ...]:
        """Keys whose record on disk is of no more use: shorter selves of tails that grew."""
        return _taken(self._residency.stale)

    def take_fallen(self) -> tuple[BlockHash, ...]:
        """Keys whose rank may have fallen since the last call, for the order of the disk."""
        return _taken(self._residency.fallen)

    def resident_keys(self) -> tuple[BlockHash, ...]:
        """Keys of all blocks in memory, longest known first."""
        return tuple(self._residency.index.entries)

    def tiers_of(self, key: BlockHash) -> tuple[Tier, ...]:
        """Tiers that hold the block; DISK as far as memory knows, so never for it alone."""
        entry = self._residency.index.get(key)
        return () if entry is None else entry.tiers

    def was_evicted(self, key: BlockHash) -> bool:
        """Whether the block left every tier, as far as is remembered."""
        return key in self._residency.evicted

    def was_corrupt(self, key: BlockHash) -> bool:
        """Whether it left because its bytes were damaged."""
        return self._residency.evicted.was_corrupt(key)

    def forget(self, keys: Iterable[BlockHash]) -> tuple[BlockHash, ...]:
        """Drop blocks that no session reaches any more; held ones go with their last lease.

        Returns:
            Keys to delete on disk: all that may be there.
        """
        wanted = list(keys)
        for key in wanted:
            self._fetcher.forget(key)
            entry = self._residency.index.get(key)
            if entry is not None:
                self._residency.drop(entry)
        return tuple(wanted) if self._residency.disk else ()

    # -- figures

    def wanted_from_larger(self) -> dict[Tier, Ghosts]:
        """What was looked for and had left, by tier; see :mod:`sessionkv.cache.ghosts`."""
        return self._residency.ghosts

    def ledger(self) -> Ledger:
        """Blocks by tier and state now."""
        return Ledger(
            device=self._residency.device.ledger(),
            host=self._residency.host.ledger(),
            sequences=len(self._running),
            transfers_in_flight=len(self._fetcher) + len(self._spiller),
        )

    def usage(self) -> CacheUsage:
        """Ledger, counters and waste. O(blocks)."""
        running_waste = sum(len(s.table) * self.block_size - s.committed for s in self._running)
        device = self._residency.contents(Tier.DEVICE)
        return CacheUsage(
            ledger=self.ledger(),
            counters=self._residency.counters,
            device=device,
            host=self._residency.contents(Tier.HOST),
            wasted_device_slots=running_waste + device.unused_slots,
            queued_blocks=self._spiller.dirty_count,
            indexed_blocks=len(self._residency.index),
        )

    def check(self) -> None:
        """Recount everything. O(blocks).

        Raises:
            InvariantBroken: With what disagrees.
        """
        check_cache(self._residency, self._running, self._fetcher, self._spiller)


def _taken(keys: dict[BlockHash, None]) -> tuple[BlockHash, ...]:
    """Empties ``keys``; asked in each step, and nearly always there are none."""
    if not keys:
        return ()
    taken = tuple(keys)
    keys.clear()
    return taken
