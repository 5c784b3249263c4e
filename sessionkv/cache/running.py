"""The running sequences: what they stage, commit, lend each other and leave behind.

In one plan a sequence may read full blocks that another of the same plan fills: they are *staged*
until the step's success is committed or the plan is dropped. A sequence that holds staged blocks
of another is its borrower; if the lender ends without committing, the borrower is broken and can
only be ended too.
"""

from __future__ import annotations

from collections.abc import Iterator

from sessionkv.cache.block_pool import LeaseError
from sessionkv.cache.fetching import Fetcher
from sessionkv.cache.meeting import abandon
from sessionkv.cache.residency import Residency
from sessionkv.cache.sequence import RunningSequence, StagedBlock
from sessionkv.types import BlockHash, BlockRecord


class RunningSet:
    """All running sequences.

    Attributes:
        staged: Full blocks that the plan being built will fill, by hash.
        fillers: Sequence that fills a block next, by the block's hash.
    """

    def __init__(self, residency: Residency, fetcher: Fetcher, *, keep_blocks: bool) -> None:
        self._residency = residency
        self._fetcher = fetcher
        self._keep_blocks = keep_blocks
        self._sequences: dict[int, RunningSequence] = {}
        self._staging: dict[int, RunningSequence] = {}
        self.staged: dict[BlockHash, StagedBlock] = {}
        self.fillers: dict[BlockHash, int] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[RunningSequence]:
        return iter(self._sequences.values())

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._sequences

    def get(self, seq_id: int) -> RunningSequence:
        """The sequence.

        Raises:
            LeaseError: It has not been admitted, or has ended.
        """
        try:
            return self._sequences[seq_id]
        except KeyError:
            raise LeaseError(f"sequence {seq_id} is not running") from None

    def add(self, sequence: RunningSequence, lenders: set[int]) -> None:
        """A sequence was admitted, holding staged blocks of ``lenders``."""
        self._sequences[sequence.seq_id] = sequence
        sequence.lenders = lenders
        for seq_id in lenders:
            self._sequences[seq_id].borrowers.add(sequence.seq_id)
        self.move_frontier(sequence)

    # -- one step

    def stage(self, sequence: RunningSequence, num_tokens: int) -> None:
        """Full blocks below ``num_tokens`` may be matched by others admitted into this plan."""
        if not self._keep_blocks:
            return
        size = self._residency.block_size
        sequence.staged = num_tokens
        self._staging[sequence.seq_id] = sequence
        for block in range(sequence.committed // size, num_tokens // size):
            record = sequence.chain.block_record(block)
            self.staged.setdefault(
                record.key,
                StagedBlock(record, sequence.table[block], sequence.seq_id, sequence.disk_below),
            )
        self.move_frontier(sequence)

    def unstage(self) -> None:
        """Nothing is staged any more."""
        if not self._staging:
            return
        if self.staged:
            self.staged.clear()
            self._residency.version += 1
        for sequence in self._staging.values():
            sequence.staged = 0
            if sequence.seq_id in self._sequences:
                self.move_frontier(sequence)
        self._staging.clear()

    def commit(self, sequence: RunningSequence, num_tokens: int) -> None:
        """Blocks below ``num_tokens`` are written: publish the full ones among them."""
        residency = self._residency
        size = residency.block_size
        if sequence.broken:
            raise LeaseError(f"sequence {sequence.seq_id} has no sound prefix to commit on")
        limit = None if sequence.gap is None else sequence.gap.limit()
        if limit is not None and num_tokens > limit * size:
            raise LeaseError(f"sequence {sequence.seq_id} commits blocks that are being loaded")
        if not sequence.committed <= num_tokens <= len(sequence.table) * size:
            raise LeaseError(
                f"sequence {sequence.seq_id} commits {num_tokens} tokens after "
                f"{sequence.committed} in {len(sequence.table)} blocks of {size}"
            )
        if not sequence.settled:
            self._settle(sequence)
        for block in range(sequence.committed // size, num_tokens // size):
            self._commit_block(sequence, block)
        sequence.committed = num_tokens
        sequence.boundary = (num_tokens // size + 1) * size
        if num_tokens >= sequence.staged:
            self._settle_borrowers(sequence)
        self.move_frontier(sequence)

    def _settle(self, sequence: RunningSequence) -> None:
        """The first step has run: its copy is made and its look-up counts."""
        sequence.settled = True
        self._end_copy(sequence)
        self._residency.counters.looked_up += sequence.looked_up
        self._residency.counters.hit += sequence.hit

    def _commit_block(self, sequence: RunningSequence, block: int) -> None:
        residency = self._residency
        device_block = sequence.table[block]
        if not self._keep_blocks:
            residency.device.finish_fill(device_block, None)
            return
        staged = self.staged.get(sequence.chain.hashes[block])
        if staged is not None and staged.seq_id == sequence.seq_id:
            del self.staged[staged.record.key]
            record = staged.record
        else:
            record = sequence.chain.block_record(block)
        self._supersede_origin(sequence)
        residency.publish(record, device_block, disk_below=sequence.disk_below)

    def move_frontier(self, sequence: RunningSequence) -> None:
        """Others wait for a sequence under the hash of the full block that it fills next."""
        hashes = sequence.chain.hashes
        block = max(sequence.committed, sequence.staged) // self._residency.block_size
        key = hashes[block] if block < len(hashes) and self._keep_blocks else None
        if key == sequence.frontier_key:
            return
        self._clear_frontier(sequence)
        sequence.frontier_key = key
        if key is not None:
            self.fillers.setdefault(key, sequence.seq_id)

    def _clear_frontier(self, sequence: RunningSequence) -> None:
        key = sequence.frontier_key
        if key is not None and self.fillers.get(key) == sequence.seq_id:
            del self.fillers[key]
        sequence.frontier_key = None

    # -- lending

    def dependents(self, sequence: RunningSequence) -> tuple[int, ...]:
        """Borrowers, their borrowers and so on, in order of id."""
        found: set[int] = set()
        todo = [sequence]
        while todo:
            new = todo.pop().borrowers - found
            found |= new
            todo += [self._sequences[seq_id] for seq_id in new]
        return tuple(sorted(found))

    def _settle_borrowers(self, sequence: RunningSequence) -> None:
        """What the sequence lent is written."""
        for seq_id in sequence.borrowers:
            self._sequences[seq_id].lenders.discard(sequence.seq_id)
        sequence.borrowers.clear()

    # -- ends

    def end(self, sequence: RunningSequence, keep_tokens: int | None, *, demote: bool) -> None:
        """Give back every block of the sequence; what is written stays as cache.

        Args:
            sequence: The one that ends, at any moment of its life.
            keep_tokens: Length of the log that was kept; cuts the unfilled tail.
            demote: Its blocks are next to go.
        """
        for seq_id in self.dependents(sequence):
            borrower = self._sequences[seq_id]
            borrower.broken, borrower.settled = True, False
        self._settle_borrowers(sequence)
        for seq_id in sequence.lenders:
            self._sequences[seq_id].borrowers.discard(sequence.seq_id)
        del self._sequences[sequence.seq_id]
        self._clear_frontier(sequence)
        self._drop_staged(sequence)
        if sequence.copy_source is not None:
            # The copy of its tail is not known to have run: those slots hold nothing.
            sequence.committed -= sequence.committed % self._residency.block_size
        self._end_copy(sequence)
        if sequence.gap is not None:
            abandon(sequence, sequence.gap, self._residency)
        self._end_blocks(sequence, keep_tokens, demote=demote)

    def _end_blocks(
        self, sequence: RunningSequence, keep_tokens: int | None, *, demote: bool
    ) -> None:
        """Release the table in an order that lets the end of the chain go before its start.

        What is released last is at the end of its list: the start of the chain at the hot end,
        or, for a demotion, the end of the chain at the cold one.
        """
        table = sequence.table
        written = sequence.committed // self._residency.block_size
        others = range(written, len(table))
        if demote:
            self._residency.device.release_chain(table[:written], to_cold_end=True)
            for position in others:
                self._end_block(sequence, position, keep_tokens, demote=True)
        else:
            for position in reversed(others):
                self._end_block(sequence, position, keep_tokens, demote=False)
            self._residency.device.release_chain(reversed(table[:written]))

    def _drop_staged(self, sequence: RunningSequence) -> None:
        if self._staging.pop(sequence.seq_id, None) is None:
            return
        mine = [key for key, staged in self.staged.items() if staged.seq_id == sequence.seq_id]
        for key in mine:
            del self.staged[key]
        self._residency.version += 1

    def _end_copy(self, sequence: RunningSequence) -> None:
        """The plan with the copy-on-write has run, or never will."""
        if sequence.copy_source is not None:
            self._residency.device.release(sequence.copy_source)
            sequence.copy_source = None

    def _end_block(
        self,
        sequence: RunningSequence,
        position: int,
        keep_tokens: int | None,
        *,
        demote: bool,
    ) -> None:
        device = self._residency.device
        block = sequence.table[position]
        gap = sequence.gap
        load = None if gap is None else gap.at(position)
        if load is not None and load.is_loading:
            return  # the transfer goes on; its answer gives the block back
        if gap is not None and gap.is_there(position):
            if load is not None and load.private:
                self._fetcher.publish(load)
        elif position > sequence.committed // self._residency.block_size or not self._keep_blocks:
            device.abandon_fill(block)
            return
        elif not self._end_tail(sequence, block, keep_tokens):
            return
        device.release(block, to_cold_end=demote)

    def _end_tail(self, sequence: RunningSequence, block: int, keep_tokens: int | None) -> bool:
        """Name the unfilled tail by what of it is written and kept; False if that is nothing."""
        residency = self._residency
        start = sequence.committed - sequence.committed % residency.block_size
        end = min(
            sequence.committed,
            len(sequence.chain),
            sequence.committed if keep_tokens is None else keep_tokens,
        )
        origin, name = sequence.tail_origin, residency.device.key(block)
        if origin is not None and name is not None and end - start <= origin.fill:
            # Continued in place and not grown: it is what it was.
            residency.device.finish_fill(block, name, unfilled=True)
            return True
        record = sequence.chain.tail_record(end) if end > start else None
        if record is None:
            residency.device.abandon_fill(block)
            return False
        self._publish_tail(sequence, record, block)
        return True

    def _publish_tail(self, sequence: RunningSequence, record: BlockRecord, block: int) -> None:
        origin = sequence.tail_origin
        on_disk = origin is not None and origin.key == record.key and origin.on_disk
        if origin is not None and record.fill > origin.fill:
            self._supersede_origin(sequence)
        self._residency.publish(record, block, on_disk=on_disk, disk_below=sequence.disk_below)

    def _supersede_origin(self, sequence: RunningSequence) -> None:
        origin = sequence.tail_origin
        if origin is not None:
            sequence.tail_origin = None
            self._residency.supersede(origin.key, own_block=origin.block, on_disk=origin.on_disk)
