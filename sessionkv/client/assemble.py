"""Replies of a turn to the events an application sees, whatever happened on the way.

Pure. Handles streams that were picked up again on a new connection: the engine sends an attempt
again from its start, and what the application already has is left out.
"""

from __future__ import annotations

from typing import Any

from sessionkv.client.results import (
    StreamEvent,
    TurnResult,
    logprobs_from_wire,
    prompt_progress,
    turn_result,
)
from sessionkv.errors import ProtocolViolation, SessionKVError
from sessionkv.ipc.messages import Delta, Done, Failure, Progress, Reply, Restarted, Result


class StreamAssembler:
    """State of one stream: how much of which attempt the application has.

    Attributes:
        result: Set by the terminal event.
        over: The terminal event was fed.
    """

    def __init__(self) -> None:
        """Start with nothing received."""
        self.result: TurnResult | None = None
        self.over = False
        self._attempt = 0
        self._num_tokens = 0
        self._num_chars = 0
        self._chars_at = 0

    def feed(self, item: Reply | SessionKVError) -> StreamEvent | None:
        """Take one reply in.

        Returns:
            The event for the application; None when it has all of it already.

        Raises:
            SessionKVError: The turn failed; or the error given, which ended the connection.
        """
        if isinstance(item, Delta):
            return self._delta(item)
        if isinstance(item, Progress):
            return self._progress(item)
        if isinstance(item, Restarted):
            self._restart(item.attempt)
            return StreamEvent(restarted=True)
        self.over = True
        if isinstance(item, Done):
            return self._done(item)
        raise failure(item)

    def _progress(self, progress: Progress) -> StreamEvent:
        restarted = self._attempt not in (0, progress.attempt)
        if restarted:
            self._restart(progress.attempt)
        self._attempt = progress.attempt
        return StreamEvent(
            offset=self._num_tokens, restarted=restarted, progress=prompt_progress(progress)
        )

    def _delta(self, delta: Delta) -> StreamEvent | None:
        restarted = self._attempt not in (0, delta.attempt)
        if restarted:
            self._restart(delta.attempt)
        self._attempt = delta.attempt
        if delta.offset == 0 and self._num_tokens:
            self._chars_at = 0  # sent again from the start
        skip_tokens = min(max(0, self._num_tokens - delta.offset), len(delta.tokens))
        skip_chars = min(self._num_chars - self._chars_at, len(delta.text))
        self._chars_at += len(delta.text)
        self._num_chars = max(self._num_chars, self._chars_at)
        self._num_tokens = max(self._num_tokens, delta.offset + len(delta.tokens))
        tokens, text = tuple(delta.tokens[skip_tokens:]), delta.text[skip_chars:]
        if not (tokens or text or restarted):
            return None
        logprobs = delta.logprobs[skip_tokens:] if delta.logprobs is not None else None
        return StreamEvent(
            text,
            tokens,
            delta.offset + skip_tokens,
            logprobs_from_wire(logprobs),
            restarted=restarted,
        )

    def _done(self, done: Done) -> StreamEvent:
        restarted = self._attempt not in (0, done.attempt)
        if restarted:
            self._restart(done.attempt)
        self.result = result = turn_result(done)
        have = self._num_tokens
        return StreamEvent(
            result.text[self._num_chars :],
            result.tokens[have:],
            min(have, len(result.tokens)),
            result.logprobs[have:] if result.logprobs is not None else None,
            restarted=restarted,
            result=result,
        )

    def _restart(self, attempt: int) -> None:
        self._attempt = attempt
        self._num_tokens = self._num_chars = self._chars_at = 0


def failure(item: Reply | SessionKVError) -> SessionKVError:
    """The error that a terminal item stands for."""
    if isinstance(item, SessionKVError):
        return item
    if isinstance(item, Failure):
        return item.to_error()
    return ProtocolViolation(f"the engine answered with {item.TYPE!r}, which does not fit")


def answer(item: Reply | SessionKVError) -> Any:
    """Value of a request that is not a turn.

    Raises:
        SessionKVError: The request failed.
    """
    if isinstance(item, Result):
        return item.value
    raise failure(item)
