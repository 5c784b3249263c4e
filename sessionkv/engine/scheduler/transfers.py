"""Transfers and disk receipts between the cache's wishes and the movers' answers.

Knows which transfers are under way, how long loads take to be answered, and which disk leases wait
for them; moves nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sessionkv.engine.scheduler.kv import KVCache
from sessionkv.engine.scheduler.policy import Lane
from sessionkv.types import DiskReceipt, Tier, Transfer

LATE_S = 30.0
"""A load unanswered for so long is not waited for: its sequence would seldom be computed slower."""
LATE_FACTOR = 8
"""Nor before so many times what the load before it took for as many blocks."""


class _Lane:
    """Loads from one tier not answered, in order, and since when the first of them is the first."""

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        self.num_blocks = 0
        self.head_since = 0.0
        self.block_s = 0.0
        self.given_up: set[int] = set()
        self.is_late = False

    def add(self, transfer: Transfer, now: float) -> None:
        if not self.blocks:
            self.head_since = now
        self.blocks[transfer.transfer_id] = len(transfer.moves)
        self.num_blocks += len(transfer.moves)

    def remove(self, transfer_id: int, now: float) -> None:
        num_blocks = self.blocks.pop(transfer_id, None)
        if num_blocks is None:
            return
        self.num_blocks -= num_blocks
        self.is_late = False
        if transfer_id in self.given_up:
            self.given_up.discard(transfer_id)
        else:
            self.block_s = (now - self.head_since) / max(num_blocks, 1)
        self.head_since = now

    def give_up(self, now: float) -> set[int]:
        """Those that are not to be waited for from now on: none is answered for too long."""
        if len(self.blocks) == len(self.given_up):
            return set()
        head = self.seen(now)
        if head.head_s < max(LATE_S, LATE_FACTOR * self.block_s * head.head_blocks):
            return set()
        late = self.blocks.keys() - self.given_up
        self.given_up |= late
        self.is_late = True
        return late

    def seen(self, now: float) -> Lane:
        if not self.blocks:
            return Lane()
        head = next(iter(self.blocks.values()))
        return Lane(self.num_blocks, head, max(now - self.head_since, 0.0))


class TransferDesk:
    """Outgoing transfers, those not yet answered, and receipts to give back to the store.

    A receipt is given back exactly once: when its holder has let go of it and every read of its
    slots is answered.
    """

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._outbox: list[Transfer] = []
        self._under_way: set[int] = set()
        self._receipt_of: dict[int, int] = {}
        self._reads_left: dict[int, int] = {}
        self._let_go: set[int] = set()
        self._given_back: list[int] = []
        self._reads = _Lane()
        self._lanes = {Tier.HOST: _Lane(), Tier.DISK: self._reads}
        self.spills: set[int] = set()
        """Ids of transfers under way that copy blocks off the device and are worth waiting for."""

    def hand_out(self, transfers: Sequence[Transfer]) -> None:
        """Queue transfers for :meth:`take`; from here on they count as under way."""
        for transfer in transfers:
            self._outbox.append(transfer)
            self._under_way.add(transfer.transfer_id)
            if transfer.src is Tier.DEVICE:
                self.spills.add(transfer.transfer_id)

    def load(self, transfers: Sequence[Transfer], receipt: DiskReceipt | None, now: float) -> None:
        """Queue loads; ``receipt`` leases the slots of those that read from disk."""
        self.hand_out(transfers)
        for transfer in transfers:
            self._lanes[transfer.src].add(transfer, now)
            if receipt is not None and transfer.src is Tier.DISK:
                receipt_id = receipt.receipt_id
                self._receipt_of[transfer.transfer_id] = receipt_id
                self._reads_left[receipt_id] = self._reads_left.get(receipt_id, 0) + 1

    def lanes(self, now: float) -> Mapping[Tier, Lane]:
        """Loads under way, by tier."""
        return {tier: lane.seen(now) for tier, lane in self._lanes.items()}

    def collect_spills(self) -> None:
        """Ask the cache which blocks it wants moved to make room."""
        self.hand_out(self._kv.plan_transfers())

    def take(self) -> list[Transfer]:
        """What the movers have to do now, each once."""
        taken, self._outbox = self._outbox, []
        return taken

    def is_under_way(self, transfer_id: int) -> bool:
        """Whether a transfer was handed out, not answered, and is not too late."""
        return transfer_id in self._under_way and transfer_id not in self._reads.given_up

    def give_up_spills(self, overdue: Iterable[int]) -> None:
        """Nobody is to wait for these any longer."""
        self.spills.difference_update(overdue)

    def give_up_reads(self, now: float) -> set[int]:
        """Reads from disk that nobody is to wait for any longer, each once. O(1) mostly."""
        return self._reads.give_up(now)

    @property
    def disk_is_late(self) -> bool:
        """Whether nobody waits for reads from disk, nor begins any: until the next answer."""
        return self._reads.is_late

    def answered(self, transfer_id: int, now: float) -> None:
        """A mover is done with a transfer, well or not."""
        self._under_way.discard(transfer_id)
        self.spills.discard(transfer_id)
        for lane in self._lanes.values():
            lane.remove(transfer_id, now)
        receipt_id = self._receipt_of.pop(transfer_id, None)
        if receipt_id is None:
            return
        self._reads_left[receipt_id] -= 1
        if self._reads_left[receipt_id] == 0:
            del self._reads_left[receipt_id]
            if receipt_id in self._let_go:
                self._let_go.discard(receipt_id)
                self._given_back.append(receipt_id)

    def give_back(self, receipt: DiskReceipt | None) -> None:
        """Its holder lets go of a receipt: nothing more is going to be read with it."""
        if receipt is None:
            return
        if receipt.receipt_id in self._reads_left:
            self._let_go.add(receipt.receipt_id)
        else:
            self._given_back.append(receipt.receipt_id)

    def take_receipts(self) -> list[int]:
        """Ids of receipts the store may release now, each once."""
        taken, self._given_back = self._given_back, []
        return taken

    @property
    def num_under_way(self) -> int:
        """Transfers handed out and not answered."""
        return len(self._under_way)
