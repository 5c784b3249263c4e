"""One turn as the front sees it: who listens, what was sampled, the text it became."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sessionkv.engine.messages import KeyClaim, TurnProgress, TurnTokens
from sessionkv.ipc.messages import Delta, Done, Failure, Generate, Progress, Turn
from sessionkv.ipc.reports import cache_from_map
from sessionkv.text.messages import Message
from sessionkv.text.model import PROMPT_TAIL_TOKENS
from sessionkv.text.output import ReplyStream
from sessionkv.types import SamplingParams

_MAX_ATTEMPT = 2**31 - 1


def new_attempt() -> int:
    """A number that no other run of a key has, whichever engine ran it.

    Counting on from what a client knows would not do: another client may have come first.
    """
    return 1 + secrets.randbelow(_MAX_ATTEMPT)


def progress_of(done: Done) -> Progress:
    """What a stream is told of the prompt of an answer that was kept."""
    report = cache_from_map(done.cache)
    return Progress(
        done.id,
        attempt=done.attempt,
        prompt_tokens=report.prompt_tokens,
        device_tokens=report.device_tokens,
        host_tokens=report.host_tokens,
        disk_tokens=report.disk_tokens,
        done_tokens=report.prompt_tokens,
    )


@dataclass(slots=True)
class Subscriber:
    """A request that hears of the turn.

    Attributes:
        wants_progress: It also hears how far the prompt is.
        attempt: Of the deltas its client has, 0 for none.
    """

    connection: bytes
    request_id: int
    stream: bool
    wants_progress: bool
    attempt: int


@dataclass(frozen=True, slots=True)
class StopFound:
    """The reply ends with its first ``num_tokens`` tokens, after ``start`` characters.

    Attributes:
        stop: The stop string that ended it; None where its client did.
    """

    stop: str | None
    start: int
    num_tokens: int


class FrontTurn:
    """State of one turn from submission to its terminal event.

    Attributes:
        attempt: Names this run of a keyed turn.
        messages: Incoming messages of a chat turn, or of a stateless chat history.
        kind: ``"chat"``, ``"raw"`` or ``"prompt"`` (a generation from raw text or ids).
        continues: The reply's text goes on from the prompt's.
        prompt_raw: Raw text of a stateless conversation, to remember its reply by.
        prompt_tail: The prompt's last ids then, where a character may have begun.
        stream: Makes the reply's text; set when the request is submitted.
        progress: How far its prompt was last said to be.
        token_ids: Sampled so far.
        logprobs: One wire entry a token, where asked for.
        stop: The stop string, or the client's word, that ended the reply; None until then.
        is_kept: Something of it is journalled, as :attr:`SubmitTurn.is_kept` tells core.
        metadata: What the client wants kept with the turn.
        cancelled_keeping: With which ``keep`` its clients have had it cancelled.
        is_broken: Its text could not be made: it ends with the error that :attr:`answer` tells.
        answer: The terminal event once the reply was judged.
    """

    def __init__(
        self,
        turn_id: int,
        tenant: str,
        claim: KeyClaim | None,
        sampling: SamplingParams,
        *,
        attempt: int,
        is_kept: bool,
    ) -> None:
        self.turn_id = turn_id
        self.tenant = tenant
        self.claim = claim
        self.sampling = sampling
        self.attempt = attempt
        self.is_kept = is_kept
        self.messages: tuple[Message, ...] = ()
        self.kind = "prompt"
        self.continues = False
        self.prompt_tail: Sequence[int] = ()
        self.prompt_raw = ""
        self.stream: ReplyStream | None = None
        self.subscribers: list[Subscriber] = []
        self.progress: TurnProgress | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[list[list[Any]]] = []
        self.stop: StopFound | None = None
        self.is_broken = False
        self.metadata: Mapping[str, Any] | None = None
        self.cancelled_keeping: set[bool] = set()
        self.answer: Done | Failure = Failure(id=0)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the request asked for log-probabilities."""
        return self.sampling.logprobs is not None

    @property
    def text(self) -> str:
        """The reply's text as given out so far."""
        return self.stream.text if self.stream is not None else ""

    def continue_from(self, ids: Sequence[int], *, raw: bool) -> Sequence[int]:
        """The turn goes on from these ids, without a template; returns them."""
        self.kind = "raw" if raw else "prompt"
        self.continues = True
        self.prompt_tail = ids[-PROMPT_TAIL_TOKENS:]
        return ids

    def subscribe(self, connection: bytes, request: Turn | Generate) -> Subscriber:
        """Add a listener."""
        wants_progress = request.stream and request.progress
        subscriber = Subscriber(
            connection, request.id, request.stream, wants_progress, request.attempt
        )
        self.subscribers.append(subscriber)
        return subscriber

    def unsubscribe(self, connection: bytes) -> None:
        """Forget a connection's listeners."""
        self.subscribers = [s for s in self.subscribers if s.connection != connection]

    def push(self, new: TurnTokens) -> str:
        """Take new tokens; returns the text that became certain. Sets :attr:`stop` when found."""
        self.token_ids += new.token_ids
        self.logprobs += [
            [[entry.token_id, entry.logprob] for entry in entries] for entries in new.logprobs
        ]
        if self.stream is None:
            return ""
        shown = new.token_ids[:-1] if new.ends_turn else new.token_ids
        text = ""
        for token_id in shown:
            piece = self.stream.push(token_id)
            text += piece.text
            if piece.stop is not None:
                self.note_stop()
                break
        return text

    def note_stop(self) -> None:
        """Take over the stop string that the stream has found."""
        match = self.stream.stop if self.stream is not None else None
        if match is not None:
            self.stop = StopFound(match.stop, match.start, match.token + 1)

    def progress_so_far(self, request_id: int) -> Progress | None:
        """How far the prompt is, for one listener; None where core has said nothing of it."""
        told = self.progress
        if told is None:
            return None
        return Progress(
            request_id,
            attempt=self.attempt,
            prompt_tokens=told.prompt_tokens,
            device_tokens=told.device_tokens,
            host_tokens=told.host_tokens,
            disk_tokens=told.disk_tokens,
            done_tokens=told.done_tokens,
        )

    def delta_so_far(self, request_id: int) -> Delta:
        """Everything since the start as one delta, for a listener that comes late."""
        return Delta(
            id=request_id,
            attempt=self.attempt,
            tokens=tuple(self.token_ids),
            text=self.text,
            logprobs=list(self.logprobs) if self.wants_logprobs else None,
        )

    def addressed(self, terminal: Done | Failure, request_id: int) -> Done | Failure:
        """The terminal event under a listener's request id."""
        if isinstance(terminal, Done) and not terminal.replayed:
            return replace(terminal, id=request_id, attempt=self.attempt)
        return replace(terminal, id=request_id)
