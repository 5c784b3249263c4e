"""The front's own records inside what core keeps opaque: messages, replies, whole answers.

JSON in UTF-8, so that an exported store can be read without this program.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from sessionkv.errors import InvalidRequest, SessionDamaged
from sessionkv.ipc.codec import encode_reply
from sessionkv.ipc.messages import Done, Failure, Generate, Turn
from sessionkv.text.stored import reading
from sessionkv.types import SamplingParams

_SAMPLING_DEFAULTS = asdict(SamplingParams())
_DELIVERY_FIELDS = frozenset(
    (
        "id",
        "stream",
        "progress",
        "deadline_s",
        "priority",
        "when_busy",
        "attempt",
        "idempotency_key",
        "changed_from",
    )
)
"""How a turn is delivered and not what it asks for: no part of a request's digest."""


def pack(value: Any) -> bytes:
    """Any plain value as compact JSON; equal values give equal bytes."""
    return json.dumps(
        value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=_plain
    ).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be stored")


def pack_sampling(sampling: SamplingParams) -> bytes:
    """Sampling parameters as journalled with a turn; those at their default are left out."""
    return pack(_said(sampling))


def _said(sampling: SamplingParams) -> dict[str, Any]:
    return {
        name: value
        for name, default in _SAMPLING_DEFAULTS.items()
        if (value := getattr(sampling, name)) != default
    }


def pack_reply(done: Done, cached_tokens: int, metadata: Mapping[str, Any] | None) -> bytes:
    """A turn's reply as journalled, with what it cost and what the client wants kept with it."""
    usage = {**done.usage, "cached_tokens": cached_tokens}
    reply = {"role": "assistant", "content": done.text, "usage": usage}
    return pack(reply | ({"metadata": metadata} if metadata else {}))


def pack_response(done: Done) -> bytes:
    """A whole answer, for replay under its idempotency key."""
    values = asdict(done)
    del values["id"], values["replayed"]
    return pack(values)


def kept_answer(blob: bytes) -> Done | Failure:
    """The journalled answer, still to be addressed to a request; or why it cannot be given.

    Core has let go of a turn that it answers this way, so either is the turn's end.
    """
    try:
        with reading("the answer that is kept under the idempotency key"):
            done = Done(id=0, replayed=True, **json.loads(blob))
            if type(done.text) is not str or {type(token) for token in done.tokens} - {int}:
                raise InvalidRequest("answer", "something else", "text and token ids")
            encode_reply(done)  # JSON may hold numbers and text that no reply can carry
            return done
    except SessionDamaged as error:
        return Failure.of(0, error)


def request_digest(request: Turn | Generate) -> bytes:
    """32 bytes over what a turn asks for: equal for a retry, different for another body.

    How it is delivered (stream, request id, deadline) does not count, nor does a seed that the
    engine drew.
    """
    values = {
        item.name: getattr(request, item.name)
        for item in fields(request)
        if item.name not in _DELIVERY_FIELDS
    }
    values["sampling"] = _said(request.sampling)
    return hashlib.sha256(request.TYPE.encode() + b"\0" + pack(values)).digest()
