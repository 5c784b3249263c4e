"""A world around the cache manager whose memory can be read back: every table, every tier.

The KV of position p is the cell ``(token, digest of tokens[0..p])``. Steps write cells through the
tables the manager gives, transfers copy whole blocks, freed blocks are poisoned. Whoever reads a
table then either finds exactly the cells of its chain, or a fault.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sessionkv.cache.chain import TokenChain
from sessionkv.cache.manager import KVCacheManager
from sessionkv.cache.prefix_index import common_prefix
from sessionkv.cache.retention_view import RetentionView
from sessionkv.types import (
    BlockCopy,
    BlockHash,
    BlockRecord,
    DiskBlock,
    DiskQuery,
    DiskReceipt,
    Fetched,
    Meeting,
    MissReason,
    MoveOutcome,
    Tier,
    Transfer,
    TransferResult,
)

ROOT = BlockHash(b"identity of the tests".ljust(32, b"."))
B = 4
POISON = (-1, -1)
Cell = tuple[int, int]
Outcome = Callable[[Transfer, int], MoveOutcome]


def T(n: int, start: int = 0) -> list[int]:
    """``n`` invented token ids."""
    return [(7 * i + 3) % 90 + 5 for i in range(start, start + n)]


def cells_of(token_ids: Sequence[int]) -> list[Cell]:
    """The cell of each position."""
    digest = 0
    cells = []
    for token in token_ids:
        digest = zlib.crc32(token.to_bytes(4, "little"), digest)
        cells.append((token, digest))
    return cells


def always(outcome: MoveOutcome) -> Outcome:
    return lambda transfer, position: outcome


OK = always(MoveOutcome.OK)


class FakeDisk:
    """Records by key with slots; full, it drops the oldest record that no receipt holds."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.records: dict[BlockHash, tuple[BlockRecord, list[Cell], int]] = {}
        self.by_slot: dict[int, BlockHash] = {}
        self.leases: dict[int, tuple[int, ...]] = {}
        self.evicted: list[BlockHash] = []
        self.writes: list[BlockHash] = []
        self._next = 0

    def put(self, record: BlockRecord, cells: list[Cell]) -> MoveOutcome:
        if record.key in self.records:
            return MoveOutcome.OK
        held = {slot for slots in self.leases.values() for slot in slots}
        while len(self.records) >= self.capacity:
            victim = next((k for k, r in self.records.items() if r[2] not in held), None)
            if victim is None:
                return MoveOutcome.NO_ROOM
            self.delete([victim])
            self.evicted.append(victim)
        self._next += 1
        self.records[record.key] = (record, cells, self._next)
        self.by_slot[self._next] = record.key
        self.writes.append(record.key)
        return MoveOutcome.OK

    def read(self, record: BlockRecord, slot: int) -> list[Cell] | None:
        found = self.records.get(self.by_slot.get(slot, BlockHash(b"")))
        return list(found[1]) if found is not None and found[0] == record else None

    def delete(self, keys: Iterable[BlockHash]) -> None:
        for key in keys:
            if key in self.records:
                del self.by_slot[self.records.pop(key)[2]]

    def lookup(self, query: DiskQuery) -> DiskReceipt:
        blocks: list[DiskBlock] = []
        parent, at = query.parent, 0
        for key in query.keys:
            found = self.records.get(key)
            if found is None or found[0].parent != parent:
                break
            assert found[0].token_ids == query.token_ids[at : at + found[0].fill]
            blocks.append(DiskBlock(found[0], found[2]))
            parent, at = key, at + found[0].fill
        rest = query.token_ids[at:]
        children = [r for r in self.records.values() if r[0].parent == parent]
        best = max(children, key=lambda r: common_prefix(r[0].token_ids, rest), default=None)
        tail = None
        if best is not None and common_prefix(best[0].token_ids, rest):
            tail = DiskBlock(best[0], best[2])
        self._next += 1
        slots = tuple(block.slot for block in [*blocks, *([tail] if tail else [])])
        self.leases[self._next] = slots
        return DiskReceipt(self._next, tuple(blocks), tail)


@dataclass
class Admitted:
    """What an admission found, by tier, and what was claimed with it at once."""

    block_ids: tuple[int, ...]
    cached_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    copies: tuple[BlockCopy, ...]
    transfers: tuple[Transfer, ...]


@dataclass
class Brought:
    """What all loads of a run so far brought to its front, and what they did not."""

    cached_tokens: int = 0
    tokens: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    corrupt_blocks: int = 0
    failed_blocks: int = 0

    @property
    def host_tokens(self) -> int:
        return self.tokens[Tier.HOST]


@dataclass(eq=False)
class Run:
    """One running sequence as its scheduler sees it."""

    seq_id: int
    chain: TokenChain
    computed: int
    admission: Admitted
    waiting_for: set[int]
    receipt: DiskReceipt | None
    copies: tuple[BlockCopy, ...] = ()
    brought: Brought = field(default_factory=Brought)
    over: bool = False

    @property
    def fetched(self) -> Brought | None:
        """Once every load that was claimed is answered."""
        return None if self.waiting_for else self.brought

    @property
    def fetching(self) -> bool:
        return bool(self.waiting_for)


@dataclass
class World:
    """Manager, memory and disk. Block size 4."""

    device_blocks: int = 8
    host_blocks: int = 0
    disk_blocks: int = 0
    prefix_cache: bool = True
    retention: RetentionView | None = None
    clean_ahead: int = 0
    spill_to_disk: bool = True
    runs: dict[int, Run] = field(default_factory=dict)
    pending: list[Transfer] = field(default_factory=list)
    log: list[Transfer] = field(default_factory=list)
    contents: dict[BlockHash, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kv = KVCacheManager(
            ROOT,
            block_size=B,
            num_device_blocks=self.device_blocks,
            num_host_blocks=self.host_blocks,
            disk=self.disk_blocks > 0,
            spill_to_disk=self.spill_to_disk,
            prefix_cache=self.prefix_cache,
            retention=self.retention,
            clean_ahead_blocks=self.clean_ahead,
        )
        self.device = [[POISON] * B for _ in range(self.device_blocks)]
        self.host = [[POISON] * B for _ in range(self.host_blocks)]
        self.disk = FakeDisk(self.disk_blocks)
        self.plan: list[tuple[Run, int]] = []
        self.promised: dict[int, tuple[TransferResult, list[list[Cell]]]] = {}
        self._ids = 0

    # -- sequences

    def chain(self, token_ids: Sequence[int], tenant: str = "local") -> TokenChain:
        return TokenChain(ROOT, B, tenant=tenant, token_ids=token_ids)

    def admit(
        self,
        chain: TokenChain,
        *,
        seq_id: int | None = None,
        lookup: bool = True,
        claim: int | None = None,
    ) -> Run | None:
        """Match and admit now, ignoring whoever fills the next block; load everything at once.

        With ``claim``, only so many blocks of each tier, from the back.
        """
        if seq_id is None:
            self._ids += 1
            seq_id = self._ids
        query = self.kv.disk_query(chain) if lookup else None
        receipt = None if query is None else self.disk.lookup(query)
        match = self.kv.match(chain, receipt)
        assert match.num_tokens <= len(chain) - 1
        admission = self.kv.admit(seq_id, chain, match)
        if admission is None:
            self._release_receipts()
            return None
        assert admission.device_tokens <= admission.found_tokens <= match.num_tokens
        admitted = Admitted(
            block_ids=admission.block_ids,
            cached_tokens=admission.found_tokens,
            device_tokens=match.device_tokens,
            host_tokens=match.host_tokens,
            disk_tokens=match.disk_tokens,
            copies=admission.copies,
            transfers=(),
        )
        run = Run(seq_id, chain, admission.device_tokens, admitted, set(), receipt)
        run.copies = admission.copies
        self.runs[seq_id] = run
        admitted.transfers = self.claim(run, claim)
        return run

    def claim(self, run: Run, count: int | None = None) -> tuple[Transfer, ...]:
        """Load the last ``count`` unclaimed blocks of each tier, or all."""
        meeting = self.advance(run)
        wanted = {
            tier: min(len(positions), len(positions) if count is None else count)
            for tier, positions in meeting.unclaimed.items()
        }
        transfers = self.kv.claim(run.seq_id, wanted)
        run.waiting_for |= {transfer.transfer_id for transfer in transfers}
        self._submit(transfers)
        self._release_receipts()
        return transfers

    def advance(self, run: Run) -> Meeting:
        """Let what has arrived join its front."""
        meeting = self.kv.advance(run.seq_id)
        for tier, tokens in meeting.joined:
            run.brought.tokens[tier] += tokens
        run.computed = run.brought.cached_tokens = meeting.front_tokens
        run.over = meeting.over
        if not self.reads_the_plan(run) and not run.copies:
            self.read(run, run.computed)
        return meeting

    def stage(self, run: Run, end: int) -> bool:
        """Put positions up to ``end`` into the plan, or up to what is being loaded.

        False where there is no room for them, or nothing to compute before what is loaded.
        """
        limit = self.advance(run).limit_tokens
        end = end if limit is None else min(end, limit)
        if end <= run.computed or self.kv.reserve(run.seq_id, end) is None:
            return False
        self.kv.stage(run.seq_id, end)
        self.plan.append((run, end))
        return True

    def execute(self, failing: Iterable[Run] = ()) -> None:
        """Carry the plan out: copies, writes, then all reads; commit or roll back."""
        plan, self.plan = self.plan, []
        self.poison_freed()
        for run, _ in plan:
            for copy in run.copies:
                self.device[copy.dst][: copy.num_tokens] = self.device[copy.src][: copy.num_tokens]
            run.copies = ()
        for run, end in plan:
            cells = cells_of(run.chain.token_ids[:end])
            table = self.kv.block_table(run.seq_id)
            for position in range(run.computed, end):
                self.device[table[position // B]][position % B] = cells[position]
        lost = {run.seq_id for run in failing}
        for run in list(failing):
            lost.update(self.kv.dependents(run.seq_id))
        for run, end in plan:
            self.read(run, end)
            if run.seq_id not in lost:
                run.computed = end
                self.kv.commit(run.seq_id, end)
        for run, end in plan:
            if run.seq_id in lost:
                self._scribble(run, end)
        for run in [run for run in self.runs.values() if run.seq_id in lost]:
            self.finish(run)
        self.kv.unstage()

    def _scribble(self, run: Run, end: int) -> None:
        """A failed step leaves anything in the slots it was to write."""
        table = self.kv.block_table(run.seq_id)
        for position in range(run.computed, end):
            self.device[table[position // B]][position % B] = POISON

    def read(self, run: Run, end: int) -> None:
        """What attention of the sequence sees is its own chain."""
        table = self.kv.block_table(run.seq_id)
        seen = [self.device[table[p // B]][p % B] for p in range(end)]
        assert seen == cells_of(run.chain.token_ids[:end])

    def reads_the_plan(self, run: Run) -> bool:
        """Whether part of its prefix is still to be written by the plan being built."""
        return any(run.seq_id in self.kv.dependents(other.seq_id) for other, _ in self.plan)

    def finish(self, run: Run, keep_tokens: int | None = None) -> None:
        self._remember(run.chain)
        del self.runs[run.seq_id]
        self.plan = [(other, end) for other, end in self.plan if other is not run]
        self.kv.finish(run.seq_id, keep_tokens)

    def preempt(self, run: Run) -> None:
        self._remember(run.chain)
        del self.runs[run.seq_id]
        self.kv.preempt(run.seq_id)

    def admit_now(self, chain: TokenChain, outcome: Outcome = OK, **how: bool) -> Run:
        """Admit, making room as long as it takes."""
        for _ in range(20):
            run = self.admit(chain, **how)
            if run is not None:
                return run
            self.make_room(outcome)
        raise AssertionError("no progress")

    def stage_now(self, run: Run, end: int, outcome: Outcome = OK) -> None:
        """Stage, making room as long as it takes."""
        for _ in range(20):
            if self.stage(run, end):
                return
            self.make_room(outcome)
        raise AssertionError("no progress")

    def turn(
        self, token_ids: Sequence[int], *, outcome: Outcome = OK, tenant: str = "local"
    ) -> Run:
        """A whole turn alone: admit, fetch, compute in one chunk, finish."""
        run = self.admit_now(self.chain(token_ids, tenant), outcome)
        self.drain(outcome)
        self.compute(run, outcome)
        self.finish(run)
        self.check()
        return run

    def compute(self, run: Run, outcome: Outcome = OK) -> None:
        """All that is left of a run, around what was loaded."""
        while run.computed < len(run.chain):
            self.stage_now(run, len(run.chain), outcome)
            self.execute()

    # -- moves

    def make_room(self, outcome: Outcome = OK) -> list[Transfer]:
        """Plan spills and complete everything in flight."""
        transfers = self.kv.plan_transfers()
        self._submit(transfers)
        self.drain(outcome)
        return transfers

    def plan_transfers(self) -> list[Transfer]:
        transfers = self.kv.plan_transfers()
        self._submit(transfers)
        return transfers

    def _submit(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            self.pending.append(transfer)
            self.log.append(transfer)

    def drain(self, outcome: Outcome = OK) -> None:
        while self.pending:
            self.complete(0, outcome)

    def complete(self, index: int, outcome: Outcome = OK) -> Fetched | None:
        """Carry out one transfer and tell the manager; what was promised has only to end."""
        transfer = self.pending.pop(index)
        if transfer.transfer_id in self.promised:
            result, sources = self.promised.pop(transfer.transfer_id)
            assert [self.host[move.src] for move in transfer.moves] == sources
            assert self.kv.finish_transfer(result) is None
            return None
        return self._taken_in(transfer, self.kv.finish_transfer(self._carry_out(transfer, outcome)))

    def promise(self, index: int, outcome: Outcome = OK) -> Fetched | None:
        """Tell the manager what a load from the host is going to be answered with.

        What is behind the copies finds them made; they end with :meth:`complete`.
        """
        transfer = self.pending[index]
        sources = [list(self.host[move.src]) for move in transfer.moves]
        result = self._carry_out(transfer, outcome)
        self.promised[transfer.transfer_id] = result, sources
        return self._taken_in(transfer, self.kv.promise_transfer(result))

    def _carry_out(self, transfer: Transfer, outcome: Outcome) -> TransferResult:
        self.poison_freed()
        outcomes = tuple(
            self._move(transfer, position, outcome(transfer, position))
            for position in range(len(transfer.moves))
        )
        return TransferResult(transfer.transfer_id, outcomes, 0.0)

    def _taken_in(self, transfer: Transfer, fetched: Fetched | None) -> Fetched | None:
        self.kv.on_disk_evicted(self.disk.evicted)
        self.disk.evicted.clear()
        self.disk.delete(self.kv.take_stale())
        for run in self.runs.values():
            run.waiting_for.discard(transfer.transfer_id)
        if fetched is not None:
            run = self.runs[fetched.seq_id]
            corrupt = sum(why is MissReason.CORRUPT for why in fetched.lost.values())
            run.brought.corrupt_blocks += corrupt
            run.brought.failed_blocks += len(fetched.lost) - corrupt
            if not any(planned is run for planned, _ in self.plan):
                self.advance(run)
        self._release_receipts()
        return fetched

    def _release_receipts(self) -> None:
        """Receipts end when nothing reads their slots any more."""
        if any(transfer.src is Tier.DISK for transfer in self.pending):
            return
        held = {
            run.receipt.receipt_id for run in self.runs.values() if run.receipt and not run.over
        }
        self.disk.leases = {i: slots for i, slots in self.disk.leases.items() if i in held}

    def _move(self, transfer: Transfer, position: int, outcome: MoveOutcome) -> MoveOutcome:
        move = transfer.moves[position]
        cells = self._read_from(transfer.src, move.record, move.src)
        if cells is None:
            outcome = MoveOutcome.MISSING if outcome is MoveOutcome.OK else outcome
        elif outcome is MoveOutcome.OK:
            assert cells[: move.record.fill] == self.expected(move.record)
        if transfer.dst is Tier.DISK:
            return self.disk.put(move.record, cells or []) if outcome is MoveOutcome.OK else outcome
        memory = self.device if transfer.dst is Tier.DEVICE else self.host
        memory[move.dst] = cells if cells and outcome is MoveOutcome.OK else [POISON] * B
        return outcome

    def _read_from(self, tier: Tier, record: BlockRecord, place: int) -> list[Cell] | None:
        if tier is Tier.DISK:
            return self.disk.read(record, place)
        return list((self.device if tier is Tier.DEVICE else self.host)[place])

    # -- truth

    def _remember(self, chain: TokenChain) -> None:
        for block, key in enumerate(chain.hashes):
            self.contents[key] = tuple(chain.token_ids[: (block + 1) * B])
        for end in range(1, len(chain) + 1):
            record = chain.tail_record(end)
            if record is not None:
                self.contents[record.key] = tuple(chain.token_ids[:end])

    def expected(self, record: BlockRecord) -> list[Cell]:
        """The cells that a block of this record must hold."""
        if record.key not in self.contents:
            for run in self.runs.values():
                self._remember(run.chain)
        return cells_of(self.contents[record.key])[-record.fill :]

    def poison_freed(self) -> None:
        for block in self.kv.take_freed():
            self.device[block] = [POISON] * B

    def check(self) -> None:
        """The books balance, and everything matchable holds what its name says."""
        self.kv.check()
        self.poison_freed()
        device, host = self.kv._residency.device, self.kv._residency.host
        for transfer in self.pending:  # whatever became of their sequences
            if promised := self.promised.get(transfer.transfer_id):
                for move, outcome in zip(transfer.moves, promised[0].outcomes, strict=True):
                    assert host.num_leases(move.src)
                    assert device.num_leases(move.dst) or outcome is not MoveOutcome.OK
        for entry in self.kv._residency.index:
            wanted = self.expected(entry.record)
            fill = entry.record.fill
            if entry.device is not None:
                assert self.device[entry.device][:fill] == wanted
            if entry.host is not None:
                assert self.host[entry.host][:fill] == wanted
        for record, cells, _ in self.disk.records.values():
            assert cells[: record.fill] == self.expected(record)

    def assert_idle(self) -> None:
        """Nothing is held by anybody."""
        self.kv.check()
        assert self.kv.ledger().idle

    def device_keys(self) -> set[BlockHash]:
        return {entry.record.key for entry in self.kv._residency.index if entry.device is not None}
