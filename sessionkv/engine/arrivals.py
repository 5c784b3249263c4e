"""What comes into core's inbox, in order: all of it between two steps, turns also beside a new one.

A turn that is taken while a step is being computed only joins the queue. Whatever else comes is
kept until the step was collected, and so is what comes after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from sessionkv.engine.messages import SubmitTurn


class Arrivals:
    """Reads the inbox. Core thread only."""

    def __init__(self, drain: Callable[[float], list[object]], clock: Callable[[], float]) -> None:
        """Over an inbox's ``drain``, which nobody else calls; ``clock`` gives seconds."""
        self._drain = drain
        self._clock = clock
        self._kept: deque[object] = deque()

    def take(self, patience_s: float) -> list[object]:
        """Everything that is here, waiting up to ``patience_s`` for the first."""
        kept = [*self._kept]
        self._kept.clear()
        return kept + self._drain(0.0 if kept else patience_s)

    def turns_until(self, until_s: float) -> Iterator[SubmitTurn]:
        """Turns as they come, up to a time of the clock or to the first that is something else.

        The time is looked at before each: how long one is handled is not known. What is not taken
        is kept. An inbox waits for whole milliseconds, so the last part of one is not waited for.
        """
        while (left_s := until_s - self._clock()) > 0:
            if not self._kept:
                whole_ms = int(left_s * 1000)
                self._kept += self._drain(whole_ms / 1000)
                if not self._kept and not whole_ms:
                    return
            elif isinstance(turn := self._kept[0], SubmitTurn):
                self._kept.popleft()
                yield turn
            else:
                return
