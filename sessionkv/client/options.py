"""Keyword arguments that the two clients share, and the request fields made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields as fields_of
from typing import Any, Literal, TypedDict

from sessionkv.types import SamplingParams

_SAMPLING = frozenset(item.name for item in fields_of(SamplingParams))


class _Common(TypedDict, total=False):
    sampling: SamplingParams | None
    idempotency_key: str | None
    deadline_s: float | None
    priority: int
    progress: bool
    deltas: bool


class TurnOptions(_Common, total=False):
    """Options of a session's turn, all by keyword.

    Attributes:
        sampling: How to choose tokens and when to stop; None is the defaults.
        when_busy: While another turn of the session runs: ``"error"`` (``SessionBusy``) or
            ``"queue"``.
        idempotency_key: Makes the turn safe to repeat: the same key and request get the same
            answer, also after a crash, and a lost connection is retried.
        deadline_s: Give up after so many seconds, queueing included (``DeadlineExceeded``).
        priority: Higher goes first.
        progress: Streams also hear how far the prompt is (:class:`PromptProgress`), the first time
            before anything of the reply.
        deltas: Streams hear of the reply as it comes. Without, they have one event, the last one,
            with all of it, at the cost of a turn that is no stream.
        metadata: Plain values, up to 64 KiB as JSON, that are kept with the turn and given back by
            ``session.node()``; nothing reads them.
        changed_from: Name of the session whose conversation this one was before something was
            changed that only a new session can have, such as its tools: the report of a first turn
            with history ``follow`` says where they part.
    """

    metadata: Mapping[str, Any] | None
    changed_from: str | None
    when_busy: Literal["error", "queue"]


class GenerateOptions(_Common, total=False):
    """Options of a generation without session, all by keyword.

    Attributes:
        sampling: As for a turn.
        tools: Tools for the template, with ``messages``.
        cache: Use and fill the prefix cache.
        prompt_logprobs: Also give log-probabilities of the prompt's tokens: each one's own and so
            many (up to 20) of the likeliest. All of the prompt is computed for it.
        idempotency_key: As for a turn.
        deadline_s: As for a turn.
        priority: As for a turn.
        progress: As for a turn.
        deltas: As for a turn.
    """

    tools: Sequence[Mapping[str, Any]] | None
    cache: bool
    prompt_logprobs: int | None


def given(**fields: Any) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def given_turn(
    options: Mapping[str, object], *, stream: bool = False, **fields: Any
) -> dict[str, Any]:
    """The fields and options of a turn or generation that are not None.

    Args:
        options: The client's.
        stream: It is read as it comes, unless the options leave its deltas out.
        **fields: Of the request.

    Raises:
        TypeError: An option is a field of the sampling parameters; it says where that belongs.
    """
    for name in options:
        if name in _SAMPLING:
            raise TypeError(f"{name} belongs in sampling=SamplingParams({name}=...)")
    rest = {name: value for name, value in options.items() if name != "deltas"}
    return given(stream=(stream and options.get("deltas", True)) or None, **fields, **rest)
