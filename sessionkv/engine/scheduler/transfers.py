"""Transfers and disk receipts between the cache's wishes and the movers' answers.

Knows which transfers are under way and which disk leases wait for them; moves nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from sessionkv.engine.scheduler.kv import KVCache
from sessionkv.types import DiskReceipt, Tier, Transfer


class TransferDesk:
    """Outgoing transfers, those not yet answered, and receipts to give back to the store.

    A receipt is given back exactly once: when nothing will read its slots any more.
    """

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._outbox: list[Transfer] = []
        self._under_way: set[int] = set()
        self._receipt_of: dict[int, int] = {}
        self._reads_left: dict[int, int] = {}
        self._given_back: list[int] = []
        self.spills: set[int] = set()
        """Ids of transfers under way that copy blocks off the device."""

    def hand_out(self, transfers: Sequence[Transfer]) -> None:
        """Queue transfers for :meth:`take`; from here on they count as under way."""
        for transfer in transfers:
            self._outbox.append(transfer)
            self._under_way.add(transfer.transfer_id)
            if transfer.src is Tier.DEVICE:
                self.spills.add(transfer.transfer_id)

    def collect_spills(self) -> None:
        """Ask the cache which blocks it wants moved to make room."""
        self.hand_out(self._kv.plan_transfers())

    def take(self) -> list[Transfer]:
        """What the movers have to do now, each once."""
        taken, self._outbox = self._outbox, []
        return taken

    def is_under_way(self, transfer_id: int) -> bool:
        """Whether a transfer was handed out and not answered."""
        return transfer_id in self._under_way

    def answered(self, transfer_id: int) -> None:
        """A mover is done with a transfer, well or not."""
        self._under_way.discard(transfer_id)
        self.spills.discard(transfer_id)
        receipt_id = self._receipt_of.pop(transfer_id, None)
        if receipt_id is None:
            return
        self._reads_left[receipt_id] -= 1
        if self._reads_left[receipt_id] == 0:
            del self._reads_left[receipt_id]
            self._given_back.append(receipt_id)

    def keep_for(self, receipt: DiskReceipt, transfers: Sequence[Transfer]) -> None:
        """Give the receipt back once those of ``transfers`` that read from disk are answered."""
        reads = [t.transfer_id for t in transfers if t.src is Tier.DISK]
        if not reads:
            self.give_back(receipt)
            return
        self._reads_left[receipt.receipt_id] = len(reads)
        for transfer_id in reads:
            self._receipt_of[transfer_id] = receipt.receipt_id

    def give_back(self, receipt: DiskReceipt | None) -> None:
        """Nothing was read with the receipt and nothing will be."""
        if receipt is not None:
            self._given_back.append(receipt.receipt_id)

    def take_receipts(self) -> list[int]:
        """Ids of receipts the store may release now, each once."""
        taken, self._given_back = self._given_back, []
        return taken

    @property
    def num_under_way(self) -> int:
        """Transfers handed out and not answered."""
        return len(self._under_way)
