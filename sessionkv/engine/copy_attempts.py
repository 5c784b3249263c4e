"""Copies to and from a device of which a failure is an outcome, never an exception."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from sessionkv.engine.device_memory import Copy, Copying

_log = logging.getLogger(__name__)

StartCopies = Callable[[Sequence[Copy], object], Copying]
"""``DeviceMemory.copy_in`` or ``copy_out``."""


class CopyAttempt:
    """Copies that were asked for. The threads of movers must live to answer the others."""

    def __init__(self, start: StartCopies, copies: Sequence[Copy], after: object) -> None:
        """Start the copies, behind a fence."""
        self._count = len(copies)
        self._copying: Copying | None = None
        try:
            self._copying = start(copies, after)
        except Exception:  # noqa: BLE001 whatever a device says
            _log.exception("%d copies could not be started", self._count)

    def wait(self) -> list[bool]:
        """Wait for their end; whether each arrived, in order. To be called once."""
        if self._copying is not None:
            try:
                return self._copying.wait()
            except Exception:  # noqa: BLE001 whatever a device says
                _log.exception("%d copies failed", self._count)
        return [False] * self._count

    def hold_steps(self) -> list[bool] | None:
        """See :class:`~sessionkv.engine.device_memory.Copying`. The step loop's thread."""
        return None if self._copying is None else self._copying.hold_steps()
