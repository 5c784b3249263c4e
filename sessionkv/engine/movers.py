"""Bytes of blocks on their way between device, host and disk.

The cache leases both ends of a :class:`~sessionkv.types.Transfer` before it is submitted and until
its result is taken in, so nobody else touches the bytes meanwhile. Knows nothing of hashes, leases
or sequences; a copy that fails is an outcome, never an exception past this module.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable

from sessionkv.engine.runner import Runner
from sessionkv.store.gates import OPEN_GATES, Gates
from sessionkv.store.worker import Answers, StoreWorker
from sessionkv.types import MoveOutcome, Tier, Transfer, TransferResult

_log = logging.getLogger(__name__)


class HostArena:
    """The host tier's memory: one anonymous mapping, so resident memory grows only with use.

    Attributes:
        num_blocks: Blocks it has room for.
        block_bytes: Bytes of one block.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        """Reserve the addresses; no memory is taken before a block is written."""
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._view = memoryview(mmap.mmap(-1, max(1, num_blocks * block_bytes), flags=private))

    def view(self, block_id: int) -> memoryview:
        """Writable bytes of one block; valid as long as it is referenced.

        Raises:
            IndexError: No such block.
        """
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"host block {block_id} of {self.num_blocks}")
        start = block_id * self.block_bytes
        return self._view[start : start + self.block_bytes]


class Mover:
    """Carries out transfers: DEVICE <-> HOST on a thread of its own, DISK through the store.

    Fetches (to the device) go before spills. Results go to the inbox, in any order.
    """

    def __init__(
        self,
        runner: Runner,
        host: HostArena,
        store: StoreWorker,
        inbox: Answers,
        *,
        gates: Gates = OPEN_GATES,
    ) -> None:
        """Start the thread. None of the arguments is owned; all must outlive the mover.

        Args:
            runner: Gives views of device blocks.
            host: The host tier; of 0 blocks when it is off.
            store: Where DISK transfers go.
            inbox: Takes one ``TransferResult`` for each transfer.
            gates: Points where tests hold the thread.
        """
        self._views: dict[Tier, Callable[[int], memoryview]] = {
            Tier.DEVICE: runner.block_view,
            Tier.HOST: host.view,
        }
        self._store = store
        self._inbox = inbox
        self._gates = gates
        self._changed = threading.Condition()
        self._fetches: deque[Transfer] = deque()
        self._spills: deque[Transfer] = deque()
        self._closing = False
        self._give_up_s = float("inf")
        self._thread = threading.Thread(target=self._run, name="movers", daemon=True)
        self._thread.start()

    def submit(self, transfer: Transfer) -> None:
        """Queue a transfer; answered by exactly one result. Any thread; never waits.

        The cache bounds how many there are: each leases blocks at both ends.
        """
        if Tier.DISK in (transfer.src, transfer.dst):
            self._to_store(transfer)
            return
        with self._changed:
            if self._closing:
                self._refuse(transfer)
                return
            is_fetch = transfer.dst is Tier.DEVICE
            (self._fetches if is_fetch else self._spills).append(transfer)
            self._changed.notify()

    def close(self, drain_s: float) -> int | None:
        """Finish what is queued within ``drain_s``, answer the rest as not done, end the thread.

        Returns:
            Number of transfers dropped; None when the thread does not end.
        """
        with self._changed:
            self._closing = True
            self._give_up_s = time.monotonic() + drain_s
            self._changed.notify()
        # A transfer that is under way at the deadline is finished.
        self._thread.join(drain_s + 1.0)
        if self._thread.is_alive():
            return None
        left = [*self._fetches, *self._spills]
        for transfer in left:
            self._refuse(transfer)
        return len(left)

    def _to_store(self, transfer: Transfer) -> None:
        is_write = transfer.dst is Tier.DISK
        try:
            view = self._views[transfer.src if is_write else transfer.dst]
            views = [view(move.src if is_write else move.dst) for move in transfer.moves]
        except Exception:  # noqa: BLE001 a view that cannot be had is a failed transfer
            _log.exception("transfer %d has no memory to work on", transfer.transfer_id)
            self._refuse(transfer)
            return
        self._store.transfer(transfer, views)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._fetches or self._spills or self._closing)
                queue = self._fetches or self._spills
                if not queue or time.monotonic() >= self._give_up_s:
                    return
                transfer = queue.popleft()
            self._carry_out(transfer)

    def _carry_out(self, transfer: Transfer) -> None:
        gate = "h2d" if transfer.dst is Tier.DEVICE else "d2h"
        self._gates.pass_through(f"before_{gate}")
        started_s = time.monotonic()
        source, target = self._views[transfer.src], self._views[transfer.dst]
        outcomes: list[MoveOutcome] = []
        for move in transfer.moves:
            try:
                copy_bytes(target(move.dst), source(move.src))
                outcomes.append(MoveOutcome.OK)
            except Exception:  # noqa: BLE001 the thread must live to answer the others
                _log.exception("copying %s of %s failed", move, gate)
                outcomes.append(MoveOutcome.IO_ERROR)
        elapsed_s = time.monotonic() - started_s
        self._gates.pass_through(f"after_{gate}")
        self._inbox.put(TransferResult(transfer.transfer_id, tuple(outcomes), elapsed_s))

    def _refuse(self, transfer: Transfer) -> None:
        failed = (MoveOutcome.IO_ERROR,) * len(transfer.moves)
        self._inbox.put(TransferResult(transfer.transfer_id, failed, 0.0))


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy equal lengths of contiguous, writable memory; lets other threads run meanwhile.

    Raises:
        ValueError: The lengths differ.
    """
    if target.nbytes != source.nbytes:
        raise ValueError(f"{source.nbytes} bytes do not fit {target.nbytes}")
    # A foreign function call releases the interpreter lock, slice assignment does not.
    ctypes.memmove(_address(target), _address(source), source.nbytes)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
