"""A cache for tests of the scheduler alone: a free list, scripted matches, a record of calls."""

from collections.abc import Sequence

from sessionkv.types import (
    Admission,
    BlockHash,
    BlockMove,
    BlockRecord,
    DiskQuery,
    DiskReceipt,
    Fetched,
    Match,
    MoveOutcome,
    Tier,
    Transfer,
    TransferResult,
)

NOTHING = Match(0, 0, 0)


class FakeChain:
    """Tokens without hashes."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)

    def __len__(self) -> int:
        return len(self.token_ids)


class FakeKV:
    """Shares nothing. ``matches`` and ``queries`` are by the first token of a prompt."""

    def __init__(self, num_blocks: int, block_size: int = 4) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free = list(range(num_blocks))
        self.tables: dict[int, list[int]] = {}
        self.matches: dict[int, Match] = {}
        self.queries: dict[int, DiskQuery] = {}
        self.depends: dict[int, tuple[int, ...]] = {}
        self.spills: list[Transfer] = []
        self.calls: list[tuple[object, ...]] = []
        self._fetching: dict[int, tuple[int, Match]] = {}
        self._held_back: dict[int, list[int]] = {}
        self._next_transfer = 100

    def match(self, chain: FakeChain, receipt: DiskReceipt | None = None) -> Match:
        found = self.matches.get(chain.token_ids[0], NOTHING)
        return found if receipt or not found.disk_tokens else Match(found.device_tokens, 0, 0)

    def disk_query(self, chain: FakeChain) -> DiskQuery | None:
        return self.queries.get(chain.token_ids[0])

    def admit(
        self,
        seq_id: int,
        chain: FakeChain,
        match: Match,
        *,
        use_host: bool,
        use_disk: bool,
        room_tokens: int = 0,
    ) -> Admission | None:
        host = match.host_tokens if use_host else 0
        disk = match.disk_tokens if use_disk else 0
        cached = match.device_tokens + host + disk
        if -(-max(cached, room_tokens) // self.block_size) > len(self.free):
            return None
        self.calls.append(("admit", seq_id))
        self.tables[seq_id] = []
        self.reserve(seq_id, max(cached, room_tokens))
        transfers = []
        for tier, count in ((Tier.HOST, host), (Tier.DISK, disk)):
            if count:
                record = BlockRecord(BlockHash(b"k"), BlockHash(b"p"), (1,))
                moves = (BlockMove(record, 0, self.tables[seq_id][-1]),)
                transfers.append(Transfer(self._next_transfer, tier, Tier.DEVICE, moves))
                self._fetching[self._next_transfer] = (seq_id, match)
                self._next_transfer += 1
        return Admission(
            tuple(self.tables[seq_id]),
            cached,
            match.device_tokens,
            host,
            disk,
            (),
            tuple(transfers),
        )

    def reserve(self, seq_id: int, num_tokens: int) -> tuple[int, ...] | None:
        table = self.tables[seq_id]
        count = max(0, -(-num_tokens // self.block_size) - len(table))
        if count > len(self.free):
            return None
        added = tuple(self.free.pop(0) for _ in range(count))
        table.extend(added)
        return added

    def stage(self, seq_id: int, num_tokens: int) -> None:
        self.calls.append(("stage", seq_id, num_tokens))

    def unstage(self) -> None:
        self.calls.append(("unstage",))

    def commit(self, seq_id: int, num_tokens: int) -> None:
        self.calls.append(("commit", seq_id, num_tokens))

    def dependents(self, seq_id: int) -> tuple[int, ...]:
        return self.depends.get(seq_id, ())

    def finish(self, seq_id: int, keep_tokens: int | None = None) -> None:
        self.calls.append(("finish", seq_id, keep_tokens))
        self.free += self.tables.pop(seq_id)

    def preempt(self, seq_id: int) -> None:
        self.calls.append(("preempt", seq_id))
        blocks = self.tables.pop(seq_id)
        if self.spills:
            # The room comes when the spill ends.
            self._held_back[self.spills[0].transfer_id] = blocks
        else:
            self.free += blocks

    def plan_transfers(self) -> list[Transfer]:
        planned = [t for t in self.spills if t.transfer_id in self._held_back]
        self.spills = [t for t in self.spills if t not in planned]
        return planned

    def finish_transfer(self, result: TransferResult) -> Fetched | None:
        self.free += self._held_back.pop(result.transfer_id, [])
        if result.transfer_id not in self._fetching:
            return None
        seq_id, match = self._fetching.pop(result.transfer_id)
        if any(owner == seq_id for owner, _ in self._fetching.values()):
            return None
        if seq_id not in self.tables:
            return None
        good = result.outcomes[0] is MoveOutcome.OK
        host, disk = (match.host_tokens, match.disk_tokens) if good else (0, 0)
        cached = match.device_tokens + host + disk
        table = self.tables[seq_id]
        while len(table) > -(-cached // self.block_size):
            self.free.append(table.pop())
        return Fetched(seq_id, tuple(table), cached, host, disk, 0, 0 if good else 1)

    def take_freed(self) -> tuple[int, ...]:
        return ()

    def block_table(self, seq_id: int) -> Sequence[int]:
        return self.tables[seq_id]
