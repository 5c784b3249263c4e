"""Threads that run jobs one after the other and say when each is done.

Daemon threads, so that a disk that never answers does not keep the process from ending.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

_log = logging.getLogger(__name__)


class Job(Protocol):
    """Work without a result of its own."""

    def run(self) -> None:
        """Do it."""
        ...


@dataclass(slots=True)
class Running:
    """A job that was handed in.

    Attributes:
        done: It has run; set before the owner is woken.
    """

    job: Job
    done: bool = False


class Threads:
    """A few threads over one queue; jobs start in the order handed in."""

    def __init__(self, name: str, count: int, wake: Callable[[], None]) -> None:
        """Prepare; nothing runs yet.

        Args:
            name: Of the threads.
            count: How many.
            wake: Called on one of them after each job; must be quick.
        """
        self._wake = wake
        self._queue: SimpleQueue[Running | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def run(self, job: Job) -> Running:
        """Run a job on the next thread that is free."""
        running = Running(job)
        self._queue.put(running)
        return running

    def close(self) -> None:
        """End the threads, once they have run everything; waits for that."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (running := self._queue.get()) is not None:
            try:
                running.job.run()
            except Exception:  # noqa: BLE001 the thread must live; the job shows what it lacks
                _log.exception("a job of %s failed", threading.current_thread().name)
            running.done = True
            self._wake()
