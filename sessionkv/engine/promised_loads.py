"""Loads that core takes in before their copies have ended, so that the step behind them is ready.

Where one sequence waits for its loads and nobody else has anything to compute, its last copies are
some milliseconds of work for the device. Once all of them are under way, the steps to come are
ordered behind them on the device (:meth:`~sessionkv.engine.device_memory.Copying.hold_steps`) and
what they bring is used as if they were answered: joining, planning and launching then take no time
of their own. Whoever comes meanwhile waits for these copies too, and not for more. The loads keep
their blocks at both ends until they are answered, so nothing a copy touches is given to others.

A copy can fail only before it is under way, which the promise tells, or with the device itself:
then no step behind it ends well, and no token of one gets out. Core thread only.
"""

from __future__ import annotations

from sessionkv.engine.copy_lanes import CopiesStarted
from sessionkv.engine.scheduler.scheduler import Scheduler
from sessionkv.types import TransferResult


class PromisedLoads:
    """Between the start of fetches and their answers."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Nothing is under way."""
        self._scheduler = scheduler
        self._started: dict[int, CopiesStarted] = {}
        self._promised: dict[int, TransferResult] = {}

    def __len__(self) -> int:
        """Loads taken in whose copies may not have ended: steps are held behind them."""
        return len(self._promised)

    def started(self, message: CopiesStarted) -> None:
        """A fetch is under way: take in all that a sequence waits for, if this was the last."""
        self._started[message.transfer.transfer_id] = message
        awaited = self._scheduler.awaited_alone
        if not awaited <= self._started.keys():
            return
        for transfer_id in sorted(awaited):
            if (result := self._started.pop(transfer_id).promise()) is not None:
                self._promised[transfer_id] = result
                self._scheduler.on_promise(result)

    def settle(self, result: TransferResult) -> None:
        """Copies have ended; their answer is for the scheduler too.

        Raises:
            RuntimeError: Other blocks have arrived than was promised: the device has failed.
        """
        self._started.pop(result.transfer_id, None)
        promised = self._promised.pop(result.transfer_id, None)
        if promised is not None and promised.outcomes != result.outcomes:
            raise RuntimeError("copies failed that steps were launched behind")
