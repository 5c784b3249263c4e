"""Messages to msgpack maps and back; the only place that reads bytes from a socket.

One frame, one map: ``{"v": 1, "t": type, "id": id, ...fields}``. Whatever bytes arrive, decoding a
request returns a checked :class:`~sessionkv.ipc.messages.Request` or raises a ``RequestError``;
extension types are refused and nothing is ever executed. Requests leave out fields that
have their default, replies those that are None.

Token lists: requests may carry an array of integers or a binary of unsigned 32-bit little-endian
integers, and :func:`encode_request` writes the latter; replies carry arrays, which take 1 to 5
bytes an id and need no second decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from typing import Any

import msgpack

from sessionkv.config import LimitsConfig
from sessionkv.errors import InvalidRequest, ProtocolViolation, RequestError
from sessionkv.ipc import messages as m
from sessionkv.ipc.limits import MAX_ARRAY, MAX_ID, MAX_ITEMS, MAX_KEY_BYTES, MAX_MAP
from sessionkv.ipc.validate import build_request, check_request
from sessionkv.types import SamplingParams, pack_tokens
from sessionkv.types.portable import node_to_map, session_to_map

_UNPACK_ERRORS = (
    ValueError,
    TypeError,
    OverflowError,
    RecursionError,
    msgpack.UnpackException,
)
_ARRAY_32 = 0xDD  # the byte before the length of an array of more than 65,535 entries
_PACK_ERRORS = (ValueError, TypeError, OverflowError)
_REPLIES: tuple[type[Any], ...] = tuple(m.REPLIES.values())
_FIELDS: Mapping[type, tuple[str, ...]] = {
    cls: tuple(item.name for item in fields(cls)) for cls in _REPLIES
}
_KNOWN = {cls: frozenset(names) for cls, names in _FIELDS.items()}
_WITH_DEFAULTS: tuple[type[Any], ...] = (*m.REQUESTS.values(), SamplingParams)
_DEFAULTS: Mapping[type, Mapping[str, Any]] = {
    cls: {
        item.name: item.default if item.default is not MISSING else {}
        for item in fields(cls)
        if item.name != "id"
    }
    for cls in _WITH_DEFAULTS
}


def decode_request(frames: Sequence[bytes], limits: LimitsConfig) -> m.Request:
    """Read one request, checking every limit and every field.

    Args:
        frames: What came after the connection's identity: exactly one frame.
        limits: The engine's bounds.

    Raises:
        RequestError: With ``request_id`` set where the frame still shows it.
    """
    if len(frames) != 1:
        raise ProtocolViolation(f"a message has exactly one frame, this one {len(frames)}")
    frame = frames[0]
    if len(frame) > limits.frame_bytes:
        raise ProtocolViolation(
            f"the frame has {len(frame)} bytes; allowed: {limits.frame_bytes}",
            frame_bytes=len(frame),
            allowed_bytes=limits.frame_bytes,
        )
    try:
        values = _unpack_map(frame)
    except ProtocolViolation as error:
        raise _placed(frame, error) from None
    request_id = _valid_id(values.get("id"))
    try:
        _check_depth(values, limits.depth)
        cls = _request_class(values)
    except ProtocolViolation as error:
        error.request_id = request_id
        raise
    return build_request(cls, values, limits)


def _request_class(values: Mapping[Any, Any]) -> type[m.Request]:
    version, kind = values.get("v"), values.get("t")
    if type(version) is not int or version != m.PROTOCOL_VERSION:
        raise ProtocolViolation(
            f"protocol version {version!r:.20} is not spoken here; supported: {m.PROTOCOL_VERSION}",
            supported=[m.PROTOCOL_VERSION],
        )
    cls = m.REQUESTS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ProtocolViolation(
            f"message type {ascii(kind)[:60]} is not known; known: {', '.join(sorted(m.REQUESTS))}"
        )
    return cls


def encode_request(request: m.Request, limits: LimitsConfig) -> bytes:
    """One request as a frame.

    Raises:
        InvalidRequest: A value cannot be sent: lone surrogates, other objects than plain data, or
            a frame over the limit. Named like the engine would name it.
    """
    values = {"v": m.PROTOCOL_VERSION, "t": request.TYPE, "id": request.id, **_differing(request)}
    try:
        sampling = values.get("sampling")
        if sampling is not None:
            if not isinstance(sampling, SamplingParams):
                raise InvalidRequest("sampling", sampling, "SamplingParams(...)")
            values["sampling"] = _differing(sampling)
        if isinstance(request, m.Import):
            values |= {
                "nodes": [node_to_map(record) for record in request.nodes],
                "sessions": [session_to_map(session) for session in request.sessions],
            }
        tokens = values.get("tokens")
        if tokens and not isinstance(tokens, bytes):
            values["tokens"] = pack_tokens(tokens)
        frame: bytes = msgpack.packb(values)
    except _PACK_ERRORS as error:
        check_request(request, limits)  # finds the field and says what is allowed
        raise InvalidRequest(request.TYPE, str(error), "plain values") from None
    if len(frame) > limits.frame_bytes:
        raise InvalidRequest(
            request.TYPE,
            f"{len(frame)} bytes long",
            f"at most {limits.frame_bytes} bytes",
            frame_bytes=len(frame),
            allowed_bytes=limits.frame_bytes,
        )
    return frame


def encode_reply(reply: m.Reply) -> bytes:
    """One reply as a frame."""
    values: dict[str, Any] = {"v": m.PROTOCOL_VERSION, "t": reply.TYPE}
    for name in _FIELDS[type(reply)]:
        value = getattr(reply, name)
        if value is not None:
            values[name] = value
    frame: bytes = msgpack.packb(values)
    return frame


def decode_reply(frames: Sequence[bytes]) -> m.Reply:
    """Read one reply of an engine; unknown fields are ignored.

    Raises:
        ProtocolViolation: It is not a reply this version knows.
    """
    if len(frames) != 1:
        raise ProtocolViolation(f"a message has exactly one frame, this one {len(frames)}")
    try:
        values = msgpack.unpackb(
            frames[0], strict_map_key=False, ext_hook=_refuse_ext, max_ext_len=0
        )
    except _UNPACK_ERRORS as error:
        raise ProtocolViolation(f"the reply cannot be read: {error}") from None
    if not isinstance(values, dict) or values.get("v") != m.PROTOCOL_VERSION:
        raise ProtocolViolation("the reply is not of this protocol version")
    kind = values.get("t")
    cls = m.REPLIES.get(kind) if isinstance(kind, str) else None
    if cls is None or type(values.get("id")) is not int:
        raise ProtocolViolation(f"the reply's type {ascii(kind)[:60]} is not known")
    known = _KNOWN[cls]
    return cls(**{name: item for name, item in values.items() if name in known})


def _differing(value: m.Request | SamplingParams) -> dict[str, Any]:
    """Fields that are not their defaults: an absent field means its default."""
    return {
        name: item
        for name, default in _DEFAULTS[type(value)].items()
        if (item := getattr(value, name)) is not default and item != default
    }


def _unpack_map(frame: bytes) -> dict[Any, Any]:
    on_list, on_map = _budget()
    try:
        values = msgpack.unpackb(
            frame,
            strict_map_key=False,  # the keys are checked in on_map: logit_bias may use integers
            list_hook=on_list,
            object_pairs_hook=on_map,
            ext_hook=_refuse_ext,
            max_array_len=MAX_ARRAY,
            max_map_len=MAX_MAP,
            max_ext_len=0,
        )
    except _UNPACK_ERRORS as error:
        reason = str(error) or type(error).__name__
        raise ProtocolViolation(f"the frame is not one msgpack map: {reason:.200}") from None
    if not isinstance(values, dict):
        raise ProtocolViolation(
            f"the frame is not one msgpack map: it holds {type(values).__name__}"
        )
    return values


def _valid_id(value: object) -> int:
    return value if type(value) is int and 0 <= value <= MAX_ID else -1


def _placed(frame: bytes, error: RequestError) -> RequestError:
    """The error of a frame that is over a bound, under its id; of one that is broken, as it is.

    An array that is too long is named. Nothing is made of the frame but its keys and the id.
    """
    unpacker = msgpack.Unpacker(
        max_str_len=MAX_KEY_BYTES, max_bin_len=0, max_array_len=0, max_map_len=0, max_ext_len=0
    )
    unpacker.feed(frame)
    request_id, placed = -1, error
    with suppress(*_UNPACK_ERRORS, IndexError):
        for _ in range(unpacker.read_map_header()):
            key = unpacker.unpack()
            at = unpacker.tell()
            if key == "id":
                request_id = _valid_id(unpacker.unpack())
                continue
            length = int.from_bytes(frame[at + 1 : at + 5], "big")
            if frame[at] == _ARRAY_32 and length > MAX_ARRAY:
                allowed = f"at most {MAX_ARRAY} (longer token lists are sent as binary)"
                placed = InvalidRequest(str(key), f"{length} entries long", allowed)
            unpacker.skip()
        if unpacker.tell() == len(frame):
            placed.request_id = request_id
            return placed
    return error


def _budget() -> tuple[
    Callable[[list[Any]], list[Any]], Callable[[Iterable[tuple[Any, Any]]], dict[Any, Any]]
]:
    """Hooks for one frame that bound how much its bytes may grow to when decoded.

    A container costs one and its entries one each. Keys are strings or integers, each once;
    integers hash to themselves, so the bound on a map's entries also bounds collisions.
    """
    left = MAX_ITEMS

    def spend(count: int) -> None:
        nonlocal left
        left -= 1 + count
        if left < 0:
            raise ValueError(f"more than {MAX_ITEMS} values (send long token lists as binary)")

    def on_list(items: list[Any]) -> list[Any]:
        spend(len(items))
        return items

    def on_map(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        pairs = list(pairs)
        spend(2 * len(pairs))
        for key, _ in pairs:
            if type(key) is not str and type(key) is not int:
                raise ValueError(f"a map key is {type(key).__name__}, not a string")
        values = dict(pairs)
        if len(values) != len(pairs):
            raise ValueError("a map has a key twice")
        return values

    return on_list, on_map


def _refuse_ext(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} is not allowed")


def _check_depth(values: dict[Any, Any], depth: int) -> None:
    """Bound the nesting of the whole frame, unknown fields included, before anything reads it."""
    level: list[Any] = [values]
    for _ in range(depth):
        below: list[Any] = []
        for item in level:
            children = item.values() if type(item) is dict else item
            below += [child for child in children if type(child) is dict or type(child) is list]
        if not below:
            return
        level = below
    raise ProtocolViolation(f"the frame is nested deeper than {depth} levels")
