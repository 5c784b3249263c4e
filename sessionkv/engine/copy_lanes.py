"""A thread that copies between device and host: both directions, or one of two.

Fetches (to the device) go before spills. What passes through staging goes before both: its copies
are short, and the disk waits for the memory they free. The thread never waits for the disk: the
store answers into the lane, which is why a disk that hangs holds up nothing else.

Where copies run beside the thread, the next transfers are started before the one before has ended,
so that the bus has no pause between two.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from sessionkv.engine.copy_attempts import CopyAttempt
from sessionkv.engine.device_memory import Copy, DeviceMemory
from sessionkv.engine.staging import StagedMoves, Staging
from sessionkv.store.gates import Gates
from sessionkv.store.worker import StoreWorker
from sessionkv.types import BlockMove, MoveOutcome, Tier, Transfer, TransferResult

_log = logging.getLogger(__name__)

STARTED = 4
"""Transfers under way at a time where copies run beside the thread: while the device is at the
first, the others are some milliseconds of work, for which the thread may be kept from its answer by
whoever holds the interpreter."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """A transfer that is to be carried out behind a fence."""

    transfer: Transfer
    fence: object

    @property
    def is_fetch(self) -> bool:
        """Whether it goes to the device."""
        return self.transfer.dst is Tier.DEVICE


@dataclass(frozen=True, slots=True)
class CopiesStarted:
    """The copies of a transfer are under way; its answer follows when they have ended.

    Attributes:
        moves: Which of its moves are copied; the others could not be.
    """

    transfer: Transfer
    moves: list[int]
    attempt: CopyAttempt

    def promise(self) -> TransferResult | None:
        """Have all steps to come wait for the copies; what they will be answered with.

        None where that cannot be said, and then nothing waits. The step loop's thread.
        """
        arrived = self.attempt.hold_steps()
        if arrived is None:
            return None
        return self.answer(arrived, 0.0)

    def answer(self, arrived: Sequence[bool], elapsed_s: float) -> TransferResult:
        """The transfer's, by whether each of its copies has arrived."""
        outcomes = [MoveOutcome.IO_ERROR] * len(self.transfer.moves)
        for i, has_arrived in zip(self.moves, arrived, strict=True):
            if has_arrived:
                outcomes[i] = MoveOutcome.OK
        return TransferResult(self.transfer.transfer_id, tuple(outcomes), elapsed_s)


@dataclass(frozen=True, slots=True)
class _Started:
    """What a lane remembers of copies under way."""

    copies: CopiesStarted
    gate: str
    started_s: float


class MoverInbox(Protocol):
    """Where the threads of movers put what they have to say. Thread-safe; never waits."""

    def put(self, item: TransferResult | CopiesStarted, /) -> None:
        """Take one message."""
        ...


class CopyLane:
    """Carries out what it is given, one answer each."""

    def __init__(
        self,
        device: DeviceMemory,
        host_view: Callable[[int], memoryview],
        inbox: MoverInbox,
        *,
        gates: Gates,
    ) -> None:
        """Prepare; nothing runs before :meth:`start`.

        Args:
            device: The pool.
            host_view: Gives the bytes of a block of the host tier.
            inbox: Takes the results; and of each fetch, where copies run beside the thread, that
                it was started.
            gates: Points where tests hold the thread.
        """
        self._device, self._host_view = device, host_view
        self._inbox, self._gates = inbox, gates
        # In host memory a copy has ended when it was started: its answer is not to wait.
        self._most_started = 1 if device.view is not None else STARTED
        self._staged: StagedMoves | None = None
        self._changed = threading.Condition()
        self._fetches: deque[Ordered] = deque()
        self._spills: deque[Ordered] = deque()
        self._staged_news: deque[Ordered | TransferResult] = deque()
        self._started: deque[_Started] = deque()
        self._answered_s = 0.0
        self._closing = False
        self._give_up_s = float("inf")
        self._thread = threading.Thread(target=self._run, name="movers", daemon=True)

    def use_staging(self, staging: Staging, store: StoreWorker) -> None:
        """Take transfers with the disk too, of one direction; before :meth:`start`."""
        self._staged = StagedMoves(self._device, staging, store, inbox=self._inbox, reply_to=self)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, ordered: Ordered) -> bool:
        """Queue a transfer; False when the lane is closing. Any thread; never waits."""
        transfer = ordered.transfer
        with self._changed:
            if self._closing:
                return False
            if Tier.DISK in (transfer.src, transfer.dst):
                self._staged_news.append(ordered)
            else:
                (self._fetches if ordered.is_fetch else self._spills).append(ordered)
            self._changed.notify()
        return True

    def put(self, item: TransferResult, /) -> None:
        """The store has done a piece of a staged transfer. Any thread."""
        with self._changed:
            self._staged_news.append(item)
            self._changed.notify()

    def stop(self, give_up_s: float) -> None:
        """Take nothing more and end when all is done, at the latest at ``give_up_s`` (monotonic).

        A copy that is under way then is finished.
        """
        with self._changed:
            self._closing = True
            self._give_up_s = give_up_s
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def refuse_rest(self) -> int:
        """Answer what is left as not done, once the thread has ended. How many transfers."""
        left = [*self._fetches, *self._spills]
        left += [news for news in self._staged_news if isinstance(news, Ordered)]
        for queue in (self._fetches, self._spills, self._staged_news):
            queue.clear()
        for ordered in left:
            self._inbox.put(refused(ordered.transfer))
        return len(left) + (0 if self._staged is None else self._staged.refuse_rest())

    # -- the thread

    def _run(self) -> None:
        while (step := self._next()) is not None:
            step()

    def _next(self) -> Callable[[], None] | None:
        """What to do next, waiting for it; None when the lane has ended."""
        with self._changed:
            while True:
                may_begin = time.monotonic() < self._give_up_s
                if self._staged_news and self._staged is not None and may_begin:
                    return partial(self._stage, self._staged, self._staged_news.popleft())
                queue = self._fetches or self._spills
                if queue and may_begin and len(self._started) < self._most_started:
                    return partial(self._start, queue.popleft())
                if self._started:
                    return self._finish
                if self._closing and (not may_begin or self._is_idle()):
                    return None
                left_s = self._give_up_s - time.monotonic()
                self._changed.wait(max(0.0, left_s) if self._closing else None)

    def _is_idle(self) -> bool:
        return not self._fetches and not self._spills and self._staged_is_idle()

    def _staged_is_idle(self) -> bool:
        return self._staged is None or (not self._staged_news and self._staged.is_idle)

    def _stage(self, staged: StagedMoves, news: Ordered | TransferResult) -> None:
        if isinstance(news, Ordered):
            staged.submit(news.transfer, news.fence)
        else:
            staged.take_in(news)
        staged.begin()

    def _start(self, ordered: Ordered) -> None:
        transfer = ordered.transfer
        gate = "h2d" if ordered.is_fetch else "d2h"
        self._gates.pass_through(f"before_{gate}")
        started_s = time.monotonic()
        copies = self._copies(transfer.moves, is_fetch=ordered.is_fetch)
        start = self._device.copy_in if ordered.is_fetch else self._device.copy_out
        attempt = CopyAttempt(start, list(copies.values()), ordered.fence)
        started = CopiesStarted(transfer, list(copies), attempt)
        self._started.append(_Started(started, gate, started_s))
        if ordered.is_fetch and self._device.view is None:
            self._inbox.put(started)

    def _copies(self, moves: Sequence[BlockMove], *, is_fetch: bool) -> dict[int, Copy]:
        """The copies of the moves whose host memory can be had, by place in ``moves``."""
        copies: dict[int, Copy] = {}
        for i, move in enumerate(moves):
            device, host = (move.dst, move.src) if is_fetch else (move.src, move.dst)
            try:
                copies[i] = device, self._host_view(host)
            except IndexError:
                _log.exception("%s has no memory on the host", move)
        return copies

    def _finish(self) -> None:
        """Answer the transfer that was started first."""
        done = self._started.popleft()
        arrived = done.copies.attempt.wait()
        now_s = time.monotonic()
        # The transfer before may still have been under way when this one was started.
        elapsed_s = now_s - max(done.started_s, self._answered_s)
        self._answered_s = now_s
        self._gates.pass_through(f"after_{done.gate}")
        self._inbox.put(done.copies.answer(arrived, elapsed_s))


def refused(transfer: Transfer) -> TransferResult:
    """The answer to a transfer that is not carried out."""
    failed = (MoveOutcome.IO_ERROR,) * len(transfer.moves)
    return TransferResult(transfer.transfer_id, failed, 0.0)
