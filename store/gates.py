"""Named points where a test can hold a thread, so that races are replayed and not hoped for."""

from __future__ import annotations

from typing import Protocol


class Gates(Protocol):
    """Called at named points of the store's and the movers' threads."""

    def pass_through(self, name: str) -> None:
        """Return when the thread may go on."""
        ...


class OpenGates:
    """Gates that never hold anybody; the default."""

    def pass_through(self, name: str) -> None:
        """Return at once."""


OPEN_GATES = OpenGates()
