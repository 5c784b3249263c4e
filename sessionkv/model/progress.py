"""How far a long preparation has come, as plain events for whoever shows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """One event of a stage that is under way.

    Attributes:
        stage: ``"download"``, ``"convert"``, ``"fingerprint"`` or ``"wait"`` (another process is
            preparing the same model).
        done: Units finished; equals ``total`` in the last event of a stage.
        total: Units in all, 0 where unknown.
        unit: ``"bytes"`` or ``"steps"``.
    """

    stage: str
    done: int
    total: int
    unit: str


ProgressSink = Callable[[Progress], None]


def no_progress(event: Progress) -> None:
    """Ignore the event; the sink of callers that show nothing."""
