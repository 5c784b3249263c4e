"""A cache for tests of the scheduler alone: a free list, scripted matches, a record of calls."""

from collections import Counter
from collections.abc import Mapping, Sequence

from sessionkv.types import (
    Admission,
    BlockHash,
    BlockMove,
    BlockRecord,
    DiskQuery,
    DiskReceipt,
    Fetched,
    Match,
    Meeting,
    MissReason,
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
        self.pieces: dict[int, int] = {}
        self.spills: list[Transfer] = []
        self.overdue_spills: tuple[int, ...] = ()
        self.calls: list[tuple[object, ...]] = []
        self._gaps: dict[int, _Gap] = {}
        self._fetching: dict[int, tuple[int, list[int]]] = {}
        self._held_back: dict[int, list[int]] = {}
        self._next_transfer = 100

    def match(self, chain: FakeChain, receipt: DiskReceipt | None = None) -> Match:
        found = self.matches.get(chain.token_ids[0], NOTHING)
        return found if receipt or not found.disk_tokens else Match(found.device_tokens, 0, 0)

    def disk_query(self, chain: FakeChain) -> DiskQuery | None:
        return self.queries.get(chain.token_ids[0])

    def make_room(
        self, chain: FakeChain, match: Match, *, room_tokens: int, most_blocks: int
    ) -> bool:
        """At once, unless a test has set ``pieces`` of the prompt's first token."""
        left = self.pieces.get(chain.token_ids[0], 0)
        self.pieces[chain.token_ids[0]] = max(left - 1, 0)
        return not left

    def admit(
        self,
        seq_id: int,
        chain: FakeChain,
        match: Match,
        *,
        room_tokens: int = 0,
    ) -> Admission | None:
        found = match.num_tokens
        if -(-max(found, room_tokens) // self.block_size) > len(self.free):
            return None
        self.calls.append(("admit", seq_id))
        self.tables[seq_id] = []
        self.reserve(seq_id, max(found, room_tokens))
        if found > match.device_tokens:
            self._gaps[seq_id] = _Gap(match, self.block_size)
        return Admission(tuple(self.tables[seq_id]), match.device_tokens, found)

    def advance(self, seq_id: int) -> Meeting:
        return self._gaps[seq_id].advance()

    def claim(self, seq_id: int, wanted: Mapping[Tier, int]) -> tuple[Transfer, ...]:
        """One transfer for each tier, of moves that name the block's position as their source."""
        transfers = []
        for tier, count in wanted.items():
            gap = self._gaps[seq_id]
            taken = gap.unclaimed[tier][-count:]
            del gap.unclaimed[tier][-count:]
            gap.states.update(dict.fromkeys(taken, "loading"))
            record = BlockRecord(BlockHash(b"k"), BlockHash(b"p"), (1,))
            moves = tuple(BlockMove(record, at, self.tables[seq_id][at]) for at in taken)
            transfers.append(Transfer(self._next_transfer, tier, Tier.DEVICE, moves))
            self._fetching[self._next_transfer] = (seq_id, taken)
            self._next_transfer += 1
        return tuple(transfers)

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
        if seq_id in self._gaps:
            self._gaps[seq_id].front_tokens = num_tokens

    def dependents(self, seq_id: int) -> tuple[int, ...]:
        return self.depends.get(seq_id, ())

    def finish(self, seq_id: int, keep_tokens: int | None = None) -> None:
        self.calls.append(("finish", seq_id, keep_tokens))
        self.free += self.tables.pop(seq_id)
        self._gaps.pop(seq_id, None)

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

    def overdue(self, now: float) -> tuple[int, ...]:
        overdue, self.overdue_spills = self.overdue_spills, ()
        return overdue

    def transfers_of(self, seq_id: int) -> set[int]:
        fetching = self._fetching.items()
        return {number for number, (whose, _) in fetching if whose == seq_id}

    def promise_transfer(self, result: TransferResult) -> Fetched | None:
        self.calls.append(("promise", result.transfer_id))
        return self.finish_transfer(result)

    def finish_transfer(self, result: TransferResult) -> Fetched | None:
        self.free += self._held_back.pop(result.transfer_id, [])
        if result.transfer_id not in self._fetching:
            return None
        seq_id, taken = self._fetching.pop(result.transfer_id)
        gap = self._gaps.get(seq_id)
        if gap is None:
            return None
        lost = {}
        for at, outcome in zip(taken, result.outcomes, strict=True):
            gap.states[at] = "there" if outcome is MoveOutcome.OK else "lost"
            if outcome is not MoveOutcome.OK:
                lost[at] = MissReason.CORRUPT
        return Fetched(seq_id, len(taken) - len(lost), lost)

    def take_freed(self) -> tuple[int, ...]:
        return ()

    def block_table(self, seq_id: int) -> Sequence[int]:
        return self.tables[seq_id]


class _Gap:
    """Whole blocks, the host's before the disk's."""

    def __init__(self, match: Match, size: int) -> None:
        self.size = size
        self.front_tokens = match.device_tokens
        self.end_tokens = match.num_tokens
        middle = (match.device_tokens + match.host_tokens) // size
        self.unclaimed = {
            Tier.HOST: list(range(match.device_tokens // size, middle)),
            Tier.DISK: list(range(middle, match.num_tokens // size)),
        }
        self.tier_of = {at: tier for tier, places in self.unclaimed.items() for at in places}
        self.states: dict[int, str] = {}

    def advance(self) -> Meeting:
        joined = []
        while self.states.get(self.front_tokens // self.size) == "there":
            joined.append((self.tier_of[self.front_tokens // self.size], self.size))
            self.front_tokens += self.size
        front = self.front_tokens // self.size
        ahead = [at for at, state in self.states.items() if at >= front and state != "lost"]
        return Meeting(
            self.front_tokens,
            tuple(joined),
            self.end_tokens,
            min(ahead) * self.size if ahead else None,
            self.unclaimed,
            Counter(self.tier_of[at] for at, state in self.states.items() if state == "loading"),
            over=self.front_tokens >= self.end_tokens,
        )
