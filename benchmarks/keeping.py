"""A front that judges nothing, for benchmarks of core by itself."""

from __future__ import annotations

from typing import Any

from sessionkv.engine.messages import (
    CallDone,
    Drain,
    TurnCommitted,
    TurnDropped,
    TurnFinished,
    Verdict,
)


class KeepingFront:
    """Stands in for the front: keeps every turn whole, and drains core when all are durable.

    Attributes:
        inbox: Core's; to be set before anything is put.
        turns_left: Turns that are not durable yet.
    """

    def __init__(self, turns: int) -> None:
        """Of so many turns."""
        self.turns_left = turns
        self.inbox: Any = None

    def put(self, messages: list[Any]) -> None:
        """Core's thread.

        Raises:
            RuntimeError: A turn or a call failed.
        """
        for message in messages:
            if isinstance(message, TurnFinished):
                kept = message.num_output_tokens
                self.inbox.put(Verdict(message.turn_id, kept, (), False, message.reason, b"", b""))
            elif isinstance(message, TurnCommitted):
                self.turns_left -= 1
                if not self.turns_left:
                    self.all_durable()
            elif isinstance(message, TurnDropped) or (
                isinstance(message, CallDone) and message.error
            ):
                raise RuntimeError(f"a turn did not run: {message}")

    def all_durable(self) -> None:
        """What comes then."""
        self.inbox.put(Drain(1.0))
