"""The front's own records inside what core keeps opaque: messages, replies, whole answers.

JSON in UTF-8, so that an exported store can be read without this program.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sessionkv.ipc.messages import Done, Generate, Turn
from sessionkv.types import SamplingParams

_SAMPLING_DEFAULTS = asdict(SamplingParams())


def pack(value: Any) -> bytes:
    """Any plain value as compact JSON; equal values give equal bytes."""
    return json.dumps(
        value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=_plain
    ).encode()


def unpack(blob: bytes) -> Any:
    """The value :func:`pack` was given; None for an empty blob."""
    return json.loads(blob) if blob else None


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


def pack_response(done: Done) -> bytes:
    """A whole answer, for replay under its idempotency key."""
    fields = asdict(done)
    del fields["id"], fields["replayed"]
    return pack(fields)


def unpack_response(blob: bytes, request_id: int) -> Done:
    """The journalled answer as the reply to another request."""
    return Done(id=request_id, replayed=True, **unpack(blob))


def request_digest(request: Turn | Generate) -> bytes:
    """32 bytes over what a turn asks for: equal for a retry, different for another body.

    How it is delivered (stream, request id, deadline) does not count, nor does a seed that the
    engine drew.
    """
    fields = {
        name: getattr(request, name)
        for cls in type(request).__mro__
        for name in getattr(cls, "__slots__", ())
        if name
        not in ("id", "stream", "deadline_s", "priority", "when_busy", "attempt", "idempotency_key")
    }
    fields["sampling"] = _said(request.sampling)
    return hashlib.sha256(request.TYPE.encode() + b"\0" + pack(fields)).digest()
