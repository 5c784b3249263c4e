"""Reads one tool call that a model writes as tags, a parameter each, and writes its JSON.

::

    <function=look>            {
    <parameter=city>           "city": "
    Oslo                       Oslo
    </parameter>               "
    <parameter=days>           , "days":
    3                          (nothing until it ends, then what its type makes of it)
    </parameter>               3
    </function>                }

Values have no quotes, so what one is, the tool's schema says: text goes out as it comes, anything
else when it is whole, as text where it is not what the schema wants. One line break at either end
belongs to the tags. To be used as :class:`~sessionkv.gateway.replies.call_reader.CallReader`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from sessionkv.gateway.replies.held import longest_start
from sessionkv.gateway.replies.json_scan import NotJson

_FUNCTION, _PARAMETER, _END = "<function=", "<parameter=", "</function>"
_CLOSER = "</parameter>"
_MAX_NAME_CHARS = 512
_PLAIN = re.compile(r"[^<\n]+")
"""No character of it begins the end of a value."""
_WORDS = {"true": True, "false": False, "null": None, "none": None}
"""As JSON writes them, and as templates write Python's."""
_TYPES: Mapping[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}

Schemas = Mapping[str, Mapping[str, Any]]
"""Of tools' arguments, by name."""


class XmlCallReader:
    """One call, character by character; the first one pushed is the bracket of its function.

    Attributes:
        name: Of the tool, None until it is known.
        is_complete: Its end has come.
    """

    __slots__ = (
        "_is_first", "_keys", "_kinds", "_parts", "_schemas", "_tag", "_value", "_whole",
        "is_complete", "name",
    )  # fmt: skip

    def __init__(self, schemas: Schemas) -> None:
        """Start before the call."""
        self.name: str | None = None
        self.is_complete = False
        self._schemas = schemas
        self._parts: list[str] = []  # of the arguments, not yet taken
        self._tag = ""  # as far as it has come, between values
        self._keys: set[str] = set()
        self._value: str | None = None  # what may be its end already; None between values
        self._whole: list[str] = []  # of a value that is told when whole
        self._is_first = False  # nothing of the value has come
        self._kinds: frozenset[str] = frozenset()  # of a value that is told when whole; else text

    @property
    def has_begun(self) -> bool:
        """The name is known."""
        return self.name is not None

    @property
    def is_closed(self) -> bool:
        """The call has ended."""
        return self.is_complete

    def take(self) -> str:
        """What has come of the arguments' JSON since it was asked for last."""
        text = "".join(self._parts)
        self._parts.clear()
        return text

    def push_plain(self, text: str, at: int) -> int:
        """Take what cannot be a value's end, at once; returns how much, 0 elsewhere."""
        match = _PLAIN.match(text, at) if self._value == "" and not self._is_first else None
        if match is None:
            return 0
        self._tell(match[0])
        return len(match[0])

    def push(self, char: str) -> None:
        """Take the next character.

        Raises:
            NotJson: It is no call. What was taken before stays so.
        """
        if self._value is not None:
            self._in_value(char)
            return
        if not self._tag and char.isspace():
            return
        self._tag += char
        if self._tag == _END and self.name is not None:
            self._parts.append("}")
            self.is_complete = True
            return
        mark = _FUNCTION if self.name is None else _PARAMETER
        if char == ">" and self._tag.startswith(mark):
            self._begin(self._tag[len(mark) : -1].strip())
        elif not _may_be(self._tag, mark) and not (self.name and _END.startswith(self._tag)):
            raise NotJson

    def _begin(self, name: str) -> None:
        """A function or a parameter, by its name."""
        if not name or name in self._keys:
            raise NotJson
        self._tag = ""
        if self.name is None:
            self.name = name
            self._parts.append("{")
            return
        self._parts.append(f"{', ' if self._keys else ''}{_quoted(name)}: ")
        self._keys.add(name)
        schema = self._schemas.get(self.name, {}).get("properties") or {}
        self._kinds = frozenset(kinds_of(schema.get(name)))
        self._value, self._is_first = "", True
        if not self._kinds:
            self._parts.append('"')

    def _in_value(self, char: str) -> None:
        is_first, self._is_first = self._is_first, False
        if is_first and char == "\n":
            return
        value = (self._value or "") + char
        if value.endswith(_CLOSER):
            self._tell(value.removesuffix(_CLOSER).removesuffix("\n"))
            self._parts.append(_json("".join(self._whole), self._kinds) if self._kinds else '"')
            self._value = None
            self._whole.clear()
            return
        held = max(longest_start(value, _CLOSER), longest_start(value, "\n" + _CLOSER))
        self._tell(value[: len(value) - held])
        self._value = value[len(value) - held :]

    def _tell(self, text: str) -> None:
        if self._kinds:
            self._whole.append(text)
        else:
            self._parts.append(_escaped(text))


def _may_be(tag: str, mark: str) -> bool:
    """Whether a tag that has no end yet may be one with a name."""
    if len(tag) <= len(mark):
        return mark.startswith(tag)
    return tag.startswith(mark) and len(tag) <= len(mark) + _MAX_NAME_CHARS and "\n" not in tag


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return _quoted(text)[1:-1]


def kinds_of(schema: object) -> Iterator[str]:
    """The types that a schema allows, where text is none of them; else none."""
    if not isinstance(schema, Mapping):
        return
    if "type" not in schema and isinstance(schema.get("enum"), list):
        kinds = [_kind(value) for value in schema["enum"]]
        yield from (kind for kind in kinds if "" not in kinds)
        return
    found = schema.get("type")
    named = [found] if isinstance(found, str) else list(found or ())
    for part in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        if isinstance(part, Mapping) and isinstance(part.get("type"), str):
            named.append(part["type"])
        else:
            return
    if all(kind in _TYPES for kind in named):
        yield from named


def _kind(value: object) -> str:
    return next((kind for kind, types in _TYPES.items() if isinstance(value, types)), "")


def _json(text: str, kinds: frozenset[str]) -> str:
    """A value as its types want it; text where it is none of them."""
    bare = text.strip()
    try:
        value = _WORDS[bare.lower()] if bare.lower() in _WORDS else json.loads(bare)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return _quoted(text)
    fits = any(isinstance(value, _TYPES[kind]) for kind in kinds)
    if isinstance(value, bool) and "boolean" not in kinds:
        fits = False
    return written if fits else _quoted(text)
