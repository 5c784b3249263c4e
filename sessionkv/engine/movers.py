"""Bytes of blocks on their way between device, host and disk.

The cache leases both ends of a :class:`~sessionkv.types.Transfer` before it is submitted and until
its result is taken in, so nobody else touches the bytes meanwhile. Knows nothing of hashes, leases
or sequences; a copy that fails is an outcome, never an exception past this module.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sessionkv.engine.copy_lanes import CopyLane, MoverInbox, Ordered, refused
from sessionkv.engine.device_memory import DeviceMemory, reserve
from sessionkv.engine.staging import READ_PIECES, STAGING_BYTES, WRITE_PIECES, Staging
from sessionkv.store.gates import OPEN_GATES, Gates
from sessionkv.store.worker import StoreWorker
from sessionkv.types import Tier, Transfer

_log = logging.getLogger(__name__)


class HostArena:
    """The host tier's memory: one anonymous mapping, resident as it is used or pinned.

    Attributes:
        num_blocks: Blocks it has room for.
        block_bytes: Bytes of one block.
        memory: All of it.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        """Reserve the addresses; no memory is taken before a block is written."""
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.memory = reserve(num_blocks * block_bytes)[: num_blocks * block_bytes]

    def view(self, block_id: int) -> memoryview:
        """Writable bytes of one block; valid as long as it is referenced.

        Raises:
            IndexError: No such block.
        """
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"host block {block_id} of {self.num_blocks}")
        start = block_id * self.block_bytes
        return self.memory[start : start + self.block_bytes]


class Mover:
    """Carries out transfers: DEVICE <-> HOST on threads of its own, DISK through the store.

    A pool in host memory has one thread, since one direction at a time keeps memory busy; there
    fetches (to the device) go before spills, and the disk reads and writes the pool itself. Any
    other has a thread for each direction of its bus, which also takes what goes to and from the
    disk through :mod:`~sessionkv.engine.staging`. Results go to the inbox, in any order.
    """

    def __init__(
        self,
        device: DeviceMemory,
        host: HostArena,
        store: StoreWorker,
        inbox: MoverInbox,
        *,
        staging_bytes: int = STAGING_BYTES,
        gates: Gates = OPEN_GATES,
    ) -> None:
        """Start the threads. None of the arguments is owned; all must outlive the mover.

        Args:
            device: The runner's memory.
            host: The host tier; of 0 blocks when it is off.
            store: Where DISK transfers go.
            inbox: Takes one ``TransferResult`` for each transfer, and of some before it that they
                were started.
            staging_bytes: Most memory for each direction between disk and device, but at least two
                blocks; only where the pool is not in host memory.
            gates: Points where tests hold the threads.
        """
        self._device, self._host = device, host
        self._store, self._inbox = store, inbox
        self._fetching = CopyLane(device, host.view, inbox, gates=gates)
        self._spilling = self._fetching
        if device.view is None:
            self._spilling = CopyLane(device, host.view, inbox, gates=gates)
            for lane, pieces in ((self._fetching, READ_PIECES), (self._spilling, WRITE_PIECES)):
                staging = Staging(device, host.block_bytes, num_bytes=staging_bytes, pieces=pieces)
                lane.use_staging(staging, store)
        device.pin(host.memory, host.block_bytes)
        self._lanes = list(dict.fromkeys((self._fetching, self._spilling)))
        for lane in self._lanes:
            lane.start()

    def submit(self, transfer: Transfer) -> None:
        """Queue a transfer; answered by exactly one result. The step loop's thread; never waits.

        The cache bounds how many there are: each leases blocks at both ends.
        """
        ends = transfer.src, transfer.dst
        if Tier.DISK in ends:
            view = self._device.view if Tier.DEVICE in ends else self._host.view
            if view is not None:
                self._to_store(transfer, view)
                return
        ordered = Ordered(transfer, self._device.fence())
        if not (self._fetching if ordered.is_fetch else self._spilling).submit(ordered):
            self._inbox.put(refused(transfer))

    def close(self, drain_s: float) -> int | None:
        """Finish what is queued within ``drain_s``, answer the rest as not done, end the threads.

        Returns:
            Number of transfers dropped; None when a thread does not end.
        """
        give_up_s = time.monotonic() + drain_s
        for lane in self._lanes:
            lane.stop(give_up_s)
        # A transfer that is under way at the deadline is finished.
        until_s = give_up_s + 1.0
        ended = [lane for lane in self._lanes if lane.join(max(0.0, until_s - time.monotonic()))]
        dropped = sum(lane.refuse_rest() for lane in ended)
        return dropped if len(ended) == len(self._lanes) else None

    def _to_store(self, transfer: Transfer, view: Callable[[int], memoryview]) -> None:
        is_write = transfer.dst is Tier.DISK
        try:
            views = [view(move.src if is_write else move.dst) for move in transfer.moves]
        except Exception:  # noqa: BLE001 a view that cannot be had is a failed transfer
            _log.exception("transfer %d has no memory to work on", transfer.transfer_id)
            self._inbox.put(refused(transfer))
            return
        self._store.transfer(transfer, views)
