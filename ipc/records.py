"""Frozen dataclasses to msgpack and back, for two processes of one engine.

A record is an array of its fields, led by its number in the codec's table where it stands alone.
How to read one back follows from the types of its fields, worked out once. Arrays come back as
tuples. Named tuples, which msgpack writes by itself, may stand inside a record. For values of this
program alone: what comes from clients goes through ``codec``.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack

from sessionkv.errors import SessionKVError, error_from_wire
from sessionkv.ipc.messages import REQUESTS, Request

Reader = Callable[[Any], Any]
_PLAIN = (int, float, str, bytes, bool, type(None), object)


class RecordCodec:
    """Encodes and decodes batches of records; one thread may encode while another decodes.

    A field may be of a plain type, a dataclass, an enumeration, an error, a path, any of the wire's
    requests, or a sequence or optional of these, or a set of plain ones. Mappings and ``Any`` hold
    plain values. What a class checks of its fields when one is made is not checked again.
    """

    def __init__(self, kinds: Sequence[type]) -> None:
        """Of records of these types; the other side names the same ones in the same order.

        Raises:
            TypeError: A field cannot be read back.
        """
        self._getters: dict[type, Callable[[Any], Any]] = {}
        self._readers: dict[type, Reader | None] = {}
        self._numbers = {kind: number for number, kind in enumerate(kinds)}
        self._kinds = [self._reader(kind) for kind in kinds]
        self._pack = msgpack.Packer(
            default=self._plain, unicode_errors="surrogatepass", autoreset=True
        ).pack

    def encode(self, records: Iterable[object]) -> bytes:
        """Some records as one frame."""
        batch = [(self._numbers[type(record)], record) for record in records]
        frame: bytes = self._pack(batch)
        return frame

    def decode(self, frame: bytes) -> list[Any]:
        """The records of a frame, in their order."""
        batch = msgpack.unpackb(
            frame, use_list=False, strict_map_key=False, unicode_errors="surrogatepass"
        )
        return [self._read(number, values) for number, values in batch]

    def _read(self, number: int, values: Any) -> Any:
        reader = self._kinds[number]
        return values if reader is None else reader(values)

    # Writing ---------------------------------------------------------------------------------

    def _plain(self, value: Any) -> Any:
        """What msgpack is to write instead of a value that it does not know."""
        getter = self._getters.get(type(value))
        if getter is None:
            getter = self._getters[type(value)] = _getter(type(value))
        return getter(value)

    # Reading ---------------------------------------------------------------------------------

    def _reader(self, hint: Any) -> Reader | None:
        """How a value of this type is read back; None where msgpack's own is it."""
        hint = getattr(hint, "__supertype__", hint)
        if hint in _PLAIN or hint is Any:
            return None
        origin, inner = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            return self._optional([arg for arg in inner if arg is not type(None)])
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return None
        if isinstance(origin, type) and issubclass(origin, AbstractSet):
            if self._reader(inner[0]) is not None:
                raise TypeError(f"{hint} cannot be read back")
            return frozenset
        if isinstance(origin, type) and issubclass(origin, Sequence):
            if origin is tuple and inner[1:] != (...,):
                raise TypeError(f"{hint} cannot be read back")
            return _each(self._reader(inner[0]))
        if isinstance(hint, type):
            if hint not in self._readers:
                self._readers[hint] = self._class_reader(hint)
            return self._readers[hint]
        raise TypeError(f"{hint} cannot be read back")

    def _optional(self, allowed: list[Any]) -> Reader | None:
        readers = [self._reader(arg) for arg in allowed]
        if not any(readers):
            return None
        if len(readers) > 1:
            raise TypeError(f"one of {allowed} cannot be told from the others")
        (reader,) = readers
        return None if reader is None else lambda value: None if value is None else reader(value)

    def _class_reader(self, kind: type) -> Reader:
        if issubclass(kind, enum.Enum | Path):
            return kind
        if issubclass(kind, SessionKVError):
            return error_from_wire
        if kind is Request:
            by_name = {name: self._reader(cls) for name, cls in REQUESTS.items()}
            return lambda values: _request(by_name, *values)
        if is_dataclass(kind) or _is_named_tuple(kind):
            hints = get_type_hints(kind)
            return _record(kind, [self._reader(hints[name]) for name in _field_names(kind)])
        raise TypeError(f"{kind} cannot be read back")


def _getter(kind: type) -> Callable[[Any], Any]:
    """What stands for a value of this type, for msgpack."""
    if issubclass(kind, Request):
        values = _field_getter(kind)
        return lambda value: (kind.TYPE, values(value))
    if issubclass(kind, enum.Enum):
        return attrgetter("value")
    if issubclass(kind, SessionKVError):
        return kind.to_wire
    if is_dataclass(kind):
        return _field_getter(kind)
    if issubclass(kind, Mapping):
        return dict
    if issubclass(kind, Path):
        return str
    if issubclass(kind, Sequence | AbstractSet):
        return list
    raise TypeError(f"{kind.__name__} cannot be sent")


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _field_names(kind: Any) -> Sequence[str]:
    return kind._fields if _is_named_tuple(kind) else [item.name for item in fields(kind)]


def _field_getter(kind: Any) -> Callable[[Any], Any]:
    names = _field_names(kind)
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def _each(reader: Reader | None) -> Reader | None:
    return None if reader is None else lambda values: tuple(map(reader, values))


def _record(kind: Callable[..., Any], readers: Sequence[Reader | None]) -> Reader:
    read = [(place, reader) for place, reader in enumerate(readers) if reader is not None]
    if hasattr(kind, "__post_init__"):
        kind = _unchecked(kind)
    if not read:
        return lambda values: kind(*values)

    def record(values: Sequence[Any]) -> Any:
        items = list(values)
        for place, reader in read:
            items[place] = reader(items[place])
        return kind(*items)

    return record


def _unchecked(kind: Any) -> Callable[..., Any]:
    """Makes a dataclass with slots of fields that its checks have seen: the other side made one."""
    setters = [getattr(kind, item.name).__set__ for item in fields(kind)]

    def make(*values: Any) -> Any:
        made = object.__new__(kind)
        for set_field, value in zip(setters, values, strict=True):
            set_field(made, value)
        return made

    return make


def _request(by_name: Mapping[str, Reader | None], name: str, values: Any) -> Any:
    reader = by_name[name]
    return values if reader is None else reader(values)
