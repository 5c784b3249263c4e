"""Every field of every request, checked: one table for the socket and the in-process transport.

What comes out is built from fresh tuples, lists and maps of plain values, so it shares nothing
mutable with what went in. Knows nothing of msgpack, sockets or the engine's state: an unknown
session or a token outside the vocabulary is the engine's to find.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

from sessionkv.config import LimitsConfig
from sessionkv.errors import InvalidRequest, ProtocolViolation, RequestError
from sessionkv.ipc import limits as bounds
from sessionkv.ipc import messages as m
from sessionkv.types import TOKEN_BYTES, NodeRecord, SamplingParams, unpack_tokens, utf8_bytes
from sessionkv.types.portable import PortableSession, node_from_map, session_from_map
from sessionkv.types.sampling import MAX_LOGPROBS
from sessionkv.types.words import number

R = TypeVar("R", bound=m.Request)
Check = Callable[[str, Any, LimitsConfig], Any]


def check_request(request: R, limits: LimitsConfig) -> R:
    """The same request with every field checked and copied.

    For transports that pass message objects; the socket's requests went through it in ``codec``.

    Raises:
        RequestError: Naming the field, its value and what is allowed; ``request_id`` is set.
    """
    values = {item.name: getattr(request, item.name) for item in fields(request)}
    return build_request(type(request), values, limits)


def build_request(cls: type[R], values: Mapping[str, Any], limits: LimitsConfig) -> R:
    """Make a request from field values; unknown fields are ignored, None means absent.

    Raises:
        RequestError: As :func:`check_request`.
    """
    request_id = values.get("id")
    if type(request_id) is not int or not 0 <= request_id <= bounds.MAX_ID:
        raise InvalidRequest("id", request_id, f"an integer from 0 to {bounds.MAX_ID}")
    try:
        for name in _REQUIRED.get(cls, ()):
            if values.get(name) is None:
                # A field that is left out and an empty one are the same on the wire.
                _CHECKS[cls][name](name, "", limits)
        _check_exactly_one(_EXACTLY_ONE.get(cls, ()), values)
        made = {
            name: check(name, values[name], limits)
            for name, check in _CHECKS[cls].items()
            if values.get(name) is not None
        }
    except RequestError as error:
        error.request_id = request_id
        raise
    return cls(id=request_id, **made)


def _check_exactly_one(names: tuple[str, ...], values: Mapping[str, Any]) -> None:
    given = [name for name in names if values.get(name) is not None]
    if names and len(given) != 1:
        found = " and ".join(given) or "none of them"
        listed = f"{', '.join(names[:-1])} and {names[-1]}"
        raise InvalidRequest(
            " | ".join(names), found, "exactly one of them", message=f"give exactly one of {listed}"
        )


def _refuse(name: str, value: object, allowed: str) -> NoReturn:
    raise InvalidRequest(name, value, allowed)


def _string(low: int, high: int) -> Check:
    def check(name: str, value: Any, limits: LimitsConfig) -> str:
        if not isinstance(value, str):
            _refuse(name, value, "a string")
        size = utf8_bytes(name, value)
        if not low <= size <= high:
            _refuse(name, f"{size} bytes long", f"{low} to {high} bytes")
        return value

    return check


def _text(name: str, value: Any, limits: LimitsConfig) -> str:
    if not isinstance(value, str):
        _refuse(name, value, "a string")
    utf8_bytes(name, value)
    return value


def _session_name(name: str, value: Any, limits: LimitsConfig) -> str:
    if not isinstance(value, str):
        _refuse(name, value, "a string")
    size = utf8_bytes(name, value)
    if not 1 <= size <= limits.session_name_bytes:
        found = f"{size} bytes long" if size else ""
        _refuse(name, found, f"1 to {limits.session_name_bytes} bytes")
    if "\0" in value:
        _refuse(name, value, "a name without NUL")
    return value


def _prefix(name: str, value: Any, limits: LimitsConfig) -> str:
    return _session_name(name, value, limits) if value != "" else ""


def _integer(low: int, high: int) -> Check:
    def check(name: str, value: Any, limits: LimitsConfig) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            _refuse(name, value, f"an integer from {low} to {high}")
        return value

    return check


def _seconds(high: float) -> Check:
    def check(name: str, value: Any, limits: LimitsConfig) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= high:
            _refuse(name, value, f"seconds above 0 and at most {number(high)}")
        return float(value)

    return check


def _boolean(name: str, value: Any, limits: LimitsConfig) -> bool:
    if not isinstance(value, bool):
        _refuse(name, value, "true or false")
    return value


def _one_of(*words: str) -> Check:
    def check(name: str, value: Any, limits: LimitsConfig) -> str:
        if not isinstance(value, str) or value not in words:
            _refuse(name, value, f"one of {', '.join(words)}")
        return value

    return check


def _version(name: str, value: Any, limits: LimitsConfig) -> int:
    if value != m.PROTOCOL_VERSION or isinstance(value, bool):
        raise ProtocolViolation(
            f"the client speaks protocol version {value!r:.20}, this engine {m.PROTOCOL_VERSION}",
            supported=[m.PROTOCOL_VERSION],
        )
    return m.PROTOCOL_VERSION


def _tokens(name: str, value: Any, limits: LimitsConfig) -> tuple[int, ...]:
    """Ids from a list, or from bytes of unsigned 32-bit little-endian integers."""
    if isinstance(value, bytes):
        if not value or len(value) % TOKEN_BYTES:
            _refuse(name, f"{len(value)} bytes long", "4 bytes a token, at least one token")
        return tuple(unpack_tokens(value))
    if not isinstance(value, list | tuple) or not value:
        _refuse(name, value, "a list of token ids that is not empty, or bytes")
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) > bounds.MAX_TOKEN:
        for i, token in enumerate(value):
            if type(token) is not int or not 0 <= token <= bounds.MAX_TOKEN:
                _refuse(f"{name}[{i}]", token, f"an integer from 0 to {bounds.MAX_TOKEN}")
    return tuple(value)


def _numbers(name: str, value: Any, limits: LimitsConfig) -> tuple[int, ...]:
    items = _list(name, value, bounds.MAX_NODES)
    number = _integer(1, bounds.MAX_ID)
    return tuple(number(f"{name}[{i}]", item, limits) for i, item in enumerate(items))


def _nodes(name: str, value: Any, limits: LimitsConfig) -> tuple[NodeRecord, ...]:
    items = _list(name, value, bounds.MAX_NODES)
    return tuple(
        item if isinstance(item, NodeRecord) else node_from_map(item, field=f"{name}[{i}]")
        for i, item in enumerate(items)
    )


def _sessions(name: str, value: Any, limits: LimitsConfig) -> tuple[PortableSession, ...]:
    found = []
    for i, item in enumerate(_list(name, value, bounds.MAX_NODES)):
        if not isinstance(item, PortableSession):
            item = session_from_map(item, field=f"{name}[{i}]")
        _session_name(f"{name}[{i}].name", item.name, limits)
        found.append(item)
    return tuple(found)


def _list(name: str, value: Any, most: int) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        _refuse(name, value, "a list")
    if len(value) > most:
        _refuse(name, f"{len(value)} long", f"at most {most}")
    return value


class _Unfit(Exception):
    """Something in a free-form value is not allowed; ``path`` grows while it travels up."""

    def __init__(self, value: object, allowed: str) -> None:
        super().__init__()
        self.path = ""
        self.value = value
        self.allowed = allowed


def _plain(value: Any, depth: int) -> Any:
    """Copy of a JSON-like value at most ``depth`` containers deep, or :class:`_Unfit`."""
    if not isinstance(value, Mapping | list | tuple):
        _check_scalar(value)
        return value
    if depth < 1:
        raise _Unfit("nested deeper", "fewer levels of lists and maps")
    is_map = isinstance(value, Mapping)
    copied: list[tuple[Any, Any]] = []
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        try:
            if is_map:
                _check_key(key)
            copied.append((key, _plain(item, depth - 1)))
        except _Unfit as unfit:
            step = f".{ascii(key)[1:-1]:.60}" if isinstance(key, str) else f"[{key!r:.60}]"
            unfit.path = step + unfit.path
            raise
    return dict(copied) if is_map else [item for _, item in copied]


def _check_key(key: object) -> None:
    if not isinstance(key, str):
        raise _Unfit(key, "a string as the key")
    _check_scalar(key)


def _check_scalar(value: object) -> None:
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                lone = value[error.start : error.end]
                raise _Unfit(lone, "text without lone surrogates") from None
    elif value is None or isinstance(value, bool):
        return
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise _Unfit(value, "an integer of 64 bits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise _Unfit(value, "a finite number")
    else:
        raise _Unfit(value, "text, number, true, false, null, list or map")


def _maps(name: str, value: Any, limits: LimitsConfig, most: int) -> list[dict[str, Any]]:
    if not isinstance(value, list | tuple):
        _refuse(name, value, "a list of maps")
    if len(value) > most:
        _refuse(name, f"{len(value)} long", f"at most {most}")
    try:
        copied: list[dict[str, Any]] = _plain(value, limits.depth - 1)
    except _Unfit as unfit:
        _refuse(name + unfit.path, unfit.value, unfit.allowed)
    for i, item in enumerate(copied):
        if not isinstance(item, dict):
            _refuse(f"{name}[{i}]", item, "a map")
    return copied


def _metadata(name: str, value: Any, limits: LimitsConfig) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        _refuse(name, value, "a map")
    (copied,) = _maps(name, [value], limits, 1)
    size = len(json.dumps(copied, ensure_ascii=False, separators=(",", ":")).encode())
    if size > bounds.MAX_METADATA_BYTES:
        _refuse(name, f"{size} bytes long", f"at most {bounds.MAX_METADATA_BYTES} bytes as JSON")
    return copied


def _tools(name: str, value: Any, limits: LimitsConfig) -> tuple[dict[str, Any], ...]:
    return tuple(_maps(name, value, limits, bounds.MAX_TOOLS))


def _messages(name: str, value: Any, limits: LimitsConfig) -> tuple[dict[str, Any], ...]:
    messages = _maps(name, value, limits, limits.messages)
    if not messages:
        _refuse(name, "empty", "at least one message")
    role = _string(1, bounds.MAX_ROLE_BYTES)
    for i, message in enumerate(messages):
        role(f"{name}[{i}].role", message.get("role"), limits)
        content = message.get("content")
        if isinstance(content, list):
            for j, part in enumerate(content):
                _check_part(f"{name}[{i}].content[{j}]", part)
        elif content is not None and not isinstance(content, str):
            _refuse(f"{name}[{i}].content", content, "text, a list of text parts, or null")
    return tuple(messages)


def _check_part(name: str, part: Any) -> None:
    if not isinstance(part, dict):
        _refuse(name, part, "a map")
    if part.get("type") != "text":
        _refuse(f"{name}.type", part.get("type"), "text")
    if not isinstance(part.get("text"), str):
        _refuse(f"{name}.text", part.get("text"), "a string")


_DEFAULT_SAMPLING = SamplingParams()
_SAMPLING_FIELDS = frozenset(item.name for item in fields(SamplingParams))


def _sampling(name: str, value: Any, limits: LimitsConfig) -> SamplingParams:
    """From a map; keys of ``logit_bias`` are integers or their decimal strings."""
    if isinstance(value, SamplingParams):
        return value
    if not isinstance(value, Mapping):
        _refuse(name, value, "a map")
    known = {key: item for key, item in value.items() if key in _SAMPLING_FIELDS}
    for key in [key for key, item in known.items() if item is None]:
        del known[key]
    if not known:
        return _DEFAULT_SAMPLING
    bias = known.get("logit_bias")
    if isinstance(bias, Mapping):
        known["logit_bias"] = {_bias_key(key): item for key, item in bias.items()}
    return SamplingParams(**known)


def _bias_key(key: object) -> object:
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10:
        return int(key)
    return key


_NAME = ("session",)
_TURN_CHECKS: Mapping[str, Check] = {
    "messages": _messages,
    "tokens": _tokens,
    "sampling": _sampling,
    "stream": _boolean,
    "progress": _boolean,
    "idempotency_key": _string(1, bounds.MAX_IDEMPOTENCY_KEY_BYTES),
    "deadline_s": _seconds(bounds.MAX_DEADLINE_S),
    "priority": _integer(-bounds.MAX_PRIORITY, bounds.MAX_PRIORITY),
    "attempt": _integer(0, 2**31 - 1),
}
_CHECKS: Mapping[type[m.Request], Mapping[str, Check]] = {
    m.Hello: {
        "version": _version,
        "client": _string(0, bounds.MAX_CLIENT_BYTES),
        "key": _string(1, bounds.MAX_API_KEY_BYTES),
        "tenant": _string(1, bounds.MAX_TENANT_BYTES),
    },
    m.Ping: {"consumed": _integer(0, bounds.MAX_ID)},
    m.Bye: {},
    m.Open: {
        "session": _session_name,
        "system": _text,
        "tools": _tools,
        "history": _one_of("keep", "follow"),
        "budget_bytes": _integer(0, bounds.MAX_ID),
        "metadata": _metadata,
    },
    m.Turn: {
        "session": _session_name,
        "text": _text,
        "when_busy": _one_of("error", "queue"),
        "metadata": _metadata,
        "changed_from": _session_name,
        **_TURN_CHECKS,
    },
    m.Generate: {
        "prompt": _text,
        "tools": _tools,
        "cache": _boolean,
        "prompt_logprobs": _integer(0, MAX_LOGPROBS),
        **_TURN_CHECKS,
    },
    m.Pieces: {"tokens": _tokens},
    m.Count: {
        "session": _session_name,
        "prompt": _text,
        "messages": _messages,
        "tools": _tools,
    },
    m.Cancel: {
        "request": _integer(0, bounds.MAX_ID),
        "keep": _boolean,
        "chars": _integer(1, bounds.MAX_ID),
    },
    m.Fork: {
        "session": _session_name,
        "name": _session_name,
        "node": _string(1, bounds.MAX_NODE_BYTES),
    },
    m.Rename: {"session": _session_name, "name": _session_name},
    m.Rewind: {"session": _session_name, "turns": _integer(1, 2**31 - 1)},
    m.Pin: {
        "session": _session_name,
        "tier": _one_of("device", "host", "disk"),
        "ttl_s": _seconds(bounds.MAX_TTL_S),
        "priority": _integer(0, bounds.MAX_PRIORITY),
    },
    m.Unpin: {"session": _session_name},
    m.Info: {"session": _session_name, "history": _boolean},
    m.Places: {"session": _session_name},
    m.Node: {
        "session": _session_name,
        "node": _string(1, bounds.MAX_NODE_BYTES),
        "path": _boolean,
    },
    m.Close: {"session": _session_name, "keep": _boolean},
    m.List: {"prefix": _prefix, "after": _session_name, "limit": _integer(1, bounds.MAX_PAGE)},
    m.Export: {"session": _session_name, "nodes": _numbers},
    m.Import: {"nodes": _nodes, "sessions": _sessions, "commit": _boolean},
    m.Flush: {},
    m.Stats: {"brief": _boolean},
}
_REQUIRED: Mapping[type[m.Request], tuple[str, ...]] = {
    m.Open: _NAME,
    m.Turn: _NAME,
    m.Pieces: ("tokens",),
    m.Cancel: ("request",),
    m.Fork: ("session", "name"),
    m.Rename: ("session", "name"),
    m.Rewind: _NAME,
    m.Pin: _NAME,
    m.Unpin: _NAME,
    m.Info: _NAME,
    m.Places: _NAME,
    m.Node: _NAME,
    m.Close: _NAME,
    m.Export: _NAME,
}
_EXACTLY_ONE: Mapping[type[m.Request], tuple[str, ...]] = {
    m.Turn: ("text", "messages", "tokens"),
    m.Generate: ("prompt", "messages", "tokens"),
    m.Count: ("prompt", "messages"),
}
