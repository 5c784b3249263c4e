"""What a reply has to look like, as a client says it: a map of one kind to its text.

Checked for its shape alone; whether the text is a grammar is found out where it is compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from sessionkv.errors import InvalidRequest
from sessionkv.types.utf8 import utf8_bytes

MAX_SCHEMA_BYTES = 256 * 1024
"""Of a JSON schema, of all choices together, and of a Lark grammar with the schemas in it."""
MAX_GRAMMAR_BYTES = 64 * 1024
"""Of a regular expression, and of a Lark grammar without them: both may nest as deep as they are
long, and beyond this some take minutes to be refused."""
MAX_CHOICES = 4096

_FIELD = "sampling.grammar"
_EMBEDDED = re.compile(r"%json\s*")
_DECODER = json.JSONDecoder()
_TEXT_KINDS = {
    "json_schema": MAX_SCHEMA_BYTES,
    "regex": MAX_GRAMMAR_BYTES,
    "lark": MAX_SCHEMA_BYTES,
}
_KINDS = (*_TEXT_KINDS, "json_object", "choice")

Grammar = Mapping[str, Any]
"""One of ``{"json_schema": str}``, ``{"json_object": True}``, ``{"regex": str}``,
``{"lark": str}`` and ``{"choice": [str, ...]}``."""


def check_grammar(value: object) -> Grammar:
    """The same, shared with nobody; choices as a tuple.

    Raises:
        InvalidRequest: Naming the field, its value and what is allowed.
    """
    if not isinstance(value, Mapping) or len(value) != 1:
        _refuse(_FIELD, value, f"a map of exactly one of {', '.join(_KINDS)}")
    ((kind, content),) = value.items()
    field = f"{_FIELD}.{kind}"
    if kind in _TEXT_KINDS:
        _check_text(field, content, _TEXT_KINDS[kind])
        if kind == "lark" and (size := _bytes_of_rules(content)) > MAX_GRAMMAR_BYTES:
            allowed = f"at most {MAX_GRAMMAR_BYTES} bytes besides its %json schemas"
            _refuse(field, f"{size} bytes long", allowed)
    elif kind == "json_object":
        if content is not True:
            _refuse(field, content, "true")
    elif kind == "choice":
        content = _choices(field, content)
    else:
        _refuse(_FIELD, kind, f"one of {', '.join(_KINDS)}")
    return {kind: content}


def _check_text(field: str, text: object, most: int) -> None:
    if not isinstance(text, str) or not text:
        _refuse(field, text, "a string that is not empty")
    size = utf8_bytes(field, text)
    if size > most:
        _refuse(field, f"{size} bytes long", f"at most {most} bytes")


def _bytes_of_rules(lark: str) -> int:
    """Length of a grammar without the values behind ``%json``; what is none counts."""
    size = at = 0
    while (found := _EMBEDDED.search(lark, at)) is not None:
        size += len(lark[at : found.end()].encode())
        try:
            at = _DECODER.raw_decode(lark, found.end())[1]
        except (ValueError, RecursionError):
            at = found.end()
    return size + len(lark[at:].encode())


def _choices(field: str, choices: object) -> tuple[str, ...]:
    if not isinstance(choices, list | tuple) or not choices:
        _refuse(field, choices, "a list of strings that is not empty")
    if len(choices) > MAX_CHOICES:
        _refuse(field, f"{len(choices)} long", f"at most {MAX_CHOICES}")
    left = MAX_SCHEMA_BYTES
    for i, choice in enumerate(choices):
        _check_text(f"{field}[{i}]", choice, left)
        left -= len(choice.encode())
    return tuple(choices)


def _refuse(field: str, value: object, allowed: str) -> NoReturn:
    raise InvalidRequest(field, value, allowed)
