"""The smallest engine: scheduler, cache and checksum runner, with memcpy for movers.

No threads, sockets, journal or text. The host tier is a list of bytes, the disk a dict. Transfers
wait in a list until the test lets them end; their bytes are copied only then, so that a block
given away too early shows.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sessionkv.cache.chain import TokenChain
from sessionkv.cache.identity import KVIdentity
from sessionkv.cache.manager import KVCacheManager
from sessionkv.config import SchedulerConfig
from sessionkv.engine.checksum_runner import ChecksumRunner
from sessionkv.engine.runner import LaterResult
from sessionkv.engine.scheduler.admission import MOST_BLOCKS
from sessionkv.engine.scheduler.batch import StepBudget
from sessionkv.engine.scheduler.policy import LoadPolicy
from sessionkv.engine.scheduler.scheduler import Scheduler
from sessionkv.engine.scheduler.sequence import Sequence as EngineSequence
from sessionkv.engine.scheduler.sequence import SequenceEvent
from sessionkv.types import (
    BlockHash,
    BlockMove,
    BlockRecord,
    CacheReport,
    DiskBlock,
    DiskQuery,
    DiskReceipt,
    MoveOutcome,
    SamplingParams,
    StepPlan,
    Tier,
    Transfer,
    TransferResult,
)
from tests.builders.checksum import GREEDY
from tests.builders.schedules import LoadAll

Fault = Callable[[Transfer, BlockMove], MoveOutcome | None]


@dataclass
class DictDisk:
    """Records by slot; a slot named by a receipt that is out is not reused."""

    capacity: int = 1 << 30
    slots: dict[int, tuple[BlockRecord, bytes]] = field(default_factory=dict)
    by_key: dict[BlockHash, int] = field(default_factory=dict)
    receipts: dict[int, list[int]] = field(default_factory=dict)
    evicted: list[BlockHash] = field(default_factory=list)
    _next: int = 0

    def look_up(self, query: DiskQuery) -> DiskReceipt:
        """How far the chain reaches here, with its slots leased."""
        found: list[DiskBlock] = []
        parent = query.parent
        for key in query.keys:
            slot = self.by_key.get(key)
            if slot is None:
                break
            found.append(DiskBlock(self.slots[slot][0], slot))
            parent = key
        tail = self._tail(parent, query.token_ids, sum(b.record.fill for b in found))
        self._next += 1
        blocks = [*found, tail] if tail else found
        self.receipts[self._next] = [block.slot for block in blocks]
        return DiskReceipt(self._next, tuple(found), tail)

    def _tail(self, parent: BlockHash, token_ids: Sequence[int], start: int) -> DiskBlock | None:
        best, shared = None, 0
        for slot in self.by_key.values():
            record = self.slots[slot][0]
            if record.parent != parent:
                continue
            same = 0
            for a, b in zip(record.token_ids, token_ids[start:], strict=False):
                if a != b:
                    break
                same += 1
            if same > shared:
                best, shared = DiskBlock(record, slot), same
        return best

    def release(self, receipt_id: int) -> None:
        """The receipt's slots may be reused."""
        del self.receipts[receipt_id]

    def write(self, record: BlockRecord, data: bytes) -> None:
        """Store a record in a fresh slot, dropping the oldest past the capacity."""
        self._next += 1
        self.slots[self._next] = (record, data)
        self.by_key[record.key] = self._next
        while len(self.by_key) > self.capacity:
            key = next(iter(self.by_key))
            self.delete(key)
            self.evicted.append(key)

    def delete(self, key: BlockHash) -> None:
        """Forget a record; its bytes stay while a receipt names them."""
        slot = self.by_key.pop(key, None)
        if slot is not None and not any(slot in slots for slots in self.receipts.values()):
            del self.slots[slot]

    def read(self, move: BlockMove) -> bytes | None:
        """Bytes of a record, None where the slot does not hold it."""
        record, data = self.slots.get(move.src, (None, b""))
        return data if record == move.record else None


class MiniEngine:
    """Call :meth:`submit`, then :meth:`step` or :meth:`run`."""

    def __init__(
        self,
        num_blocks: int,
        *,
        host_blocks: int = 0,
        disk: DictDisk | None = None,
        block_size: int = 4,
        step_tokens: int = 64,
        shared_tokens: int | None = None,
        max_model_len: int = 512,
        prefix_cache: bool = True,
        policy: LoadPolicy | None = None,
        config: SchedulerConfig | None = None,
        fault: Fault | None = None,
        root_name: str = "checksum",
        most_blocks: int = MOST_BLOCKS,
        **runner: object,
    ) -> None:
        self.runner = ChecksumRunner(
            num_blocks, block_size, max_model_len=max_model_len, fingerprint=root_name, **runner
        )
        identity = KVIdentity(root_name, self.runner.geometry, "none", "1")
        self.root = identity.root_hash()
        self.kv = KVCacheManager(
            self.root,
            block_size=block_size,
            num_device_blocks=num_blocks,
            num_host_blocks=host_blocks,
            disk=disk is not None,
            prefix_cache=prefix_cache,
        )
        self.scheduler = Scheduler(
            self.kv,
            policy or LoadAll(),
            config=config or SchedulerConfig(),
            budget=StepBudget(step_tokens, shared_tokens or step_tokens),
            max_model_len=max_model_len,
            most_blocks=most_blocks,
        )
        self.host = [bytearray(self.runner.geometry.block_bytes) for _ in range(host_blocks)]
        self.disk = disk
        self.fault = fault
        self.now = 0.0
        self.in_flight: list[Transfer] = []
        self.plans: list[StepPlan] = []
        self.launched: deque[tuple[StepPlan, LaterResult]] = deque()
        self.outputs: dict[int, list[int]] = {}
        self.ends: dict[int, SequenceEvent] = {}
        self.reports: dict[int, CacheReport] = {}
        self.hold_transfers = False
        self._next_id = 0

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int | None = 4,
        *,
        sampling: SamplingParams | None = None,
        **sequence: object,
    ) -> int:
        """Queue a prompt; its seq_id."""
        self._next_id += 1
        if sampling is None:
            sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        chain = TokenChain(self.root, self.kv.block_size, tenant="local", token_ids=prompt)
        self.outputs[self._next_id] = []
        try:
            self.scheduler.add(EngineSequence(self._next_id, chain, sampling, **sequence), self.now)
        except Exception:
            del self.outputs[self._next_id]
            raise
        return self._next_id

    def cancel(self, seq_id: int) -> bool:
        """Drop a sequence."""
        return self.scheduler.cancel(seq_id)

    def step(self) -> bool:
        """One round of the loop; whether anything was computed or moved.

        Where the runner plans ahead, a step is left in flight from one round to the next.
        """
        self._answer_lookups()
        if not self.launched:
            self._launch(self.scheduler.schedule(self.now))
        if self.launched and self.runner.plans_ahead:
            self.scheduler.load_beside(self.now)
            self._launch(self.scheduler.schedule_ahead(self.now))
        computed = bool(self.launched)
        if computed:
            self._collect()
        self.in_flight += self.scheduler.take_transfers()
        moved = bool(self.in_flight) and not self.hold_transfers
        if moved:
            self.end_transfers()
        self._tidy_disk()
        self.now += 0.001
        return computed or moved or bool(self.scheduler.num_waiting)

    def _launch(self, plan: StepPlan | None) -> None:
        if plan is not None:
            self.plans.append(plan)
            self.launched.append((plan, self.runner.launch(plan)))

    def _collect(self) -> None:
        plan, step = self.launched.popleft()
        try:
            output = step.result()
        except RuntimeError as error:
            self._take(self.scheduler.fail_step(plan, error))
        else:
            self._take(self.scheduler.commit(plan, output, self.now))

    def run(self, steps: int = 2000) -> None:
        """Step until nothing is left to do.

        Raises:
            AssertionError: 100 steps without a token while sequences are left.
        """
        idle = 0
        for _ in range(steps):
            before = sum(map(len, self.outputs.values())) + len(self.ends)
            busy = self.step()
            if not busy and not self.scheduler.num_running and not self.launched:
                return
            after = sum(map(len, self.outputs.values())) + len(self.ends)
            idle = 0 if after > before else idle + 1
            assert idle < 100, self.scheduler.idle_reason()
        raise AssertionError(f"not done after {steps} steps: {self.scheduler.idle_reason()}")

    def end_transfers(self, count: int | None = None) -> None:
        """Copy and answer the first transfers in flight."""
        count = len(self.in_flight) if count is None else count
        ending, self.in_flight = self.in_flight[:count], self.in_flight[count:]
        for transfer in ending:
            outcomes = tuple(self._move(transfer, move) for move in transfer.moves)
            result = TransferResult(transfer.transfer_id, outcomes, 0.001)
            self.scheduler.on_transfer(result, self.now)

    def assert_idle(self) -> None:
        """Nothing is held anywhere and all counts add up."""
        self.kv.check()
        assert self.kv.ledger().idle, self.kv.ledger()
        assert self.in_flight == []
        if self.disk is not None:
            assert self.disk.receipts == {}

    def _take(self, events: list[SequenceEvent]) -> None:
        for event in events:
            seq_id = event.seq_id
            if event.token is not None:
                self.outputs[seq_id].append(event.token.token_id)
            if event.finish is not None or event.error is not None:
                self.ends[seq_id] = event
            if event.finish is not None:
                self.finish(event)

    def finish(self, event: SequenceEvent) -> None:
        """Keep what counts and release."""
        sequence = self.scheduler.get(event.seq_id)
        self.reports[event.seq_id] = sequence.report()
        kept = sequence.num_prompt_tokens + event.num_output_tokens
        del self.outputs[event.seq_id][event.num_output_tokens :]
        self.scheduler.release(event.seq_id, kept)
        # As an engine does with a log that goes on otherwise than what was sampled.
        sequence.chain.truncate(kept)
        sequence.chain.extend([511] * self.kv.block_size)

    def _answer_lookups(self) -> None:
        for seq_id, query in self.scheduler.take_lookups():
            assert self.disk is not None
            self.scheduler.on_receipt(seq_id, self.disk.look_up(query))

    def _tidy_disk(self) -> None:
        if self.disk is None:
            return
        for receipt_id in self.scheduler.take_receipts():
            self.disk.release(receipt_id)
        for key in self.kv.take_stale():
            self.disk.delete(key)
        evicted, self.disk.evicted = self.disk.evicted, []
        self.kv.on_disk_evicted(evicted)

    def _move(self, transfer: Transfer, move: BlockMove) -> MoveOutcome:
        outcome = self.fault(transfer, move) if self.fault else None
        if outcome is not None:
            return outcome
        if transfer.src is Tier.DISK:
            assert self.disk is not None
            data = self.disk.read(move)
            if data is None:
                return MoveOutcome.MISSING
        else:
            data = bytes(self._extent(transfer.src, move.src))
        if transfer.dst is Tier.DISK:
            assert self.disk is not None
            self.disk.write(move.record, data)
        else:
            self._extent(transfer.dst, move.dst)[:] = data
        return MoveOutcome.OK

    def _extent(self, tier: Tier, block: int) -> memoryview | bytearray:
        return self.runner.block_view(block) if tier is Tier.DEVICE else self.host[block]


__all__ = ["GREEDY", "DictDisk", "MiniEngine"]
