"""A reply as the model wrote it, beside what a client or a template makes of it.

Clients get tool calls as parsed ones and send them back so; the template then writes their JSON in
its own spelling. Here the calls in a reply's text are found again, and two texts are compared
however their JSON is spelled. What a reply says is decided elsewhere: this only finds out whether
two of them are the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from sessionkv.text.messages import ToolCall
from sessionkv.text.tagged import tagged_calls

_DECODER = json.JSONDecoder(strict=False)
_MAX_TRIES = 64
"""Braces that begin no JSON, after which a text is taken to hold none: each costs a scan."""
_SPACE = re.compile(r"\s+")
_BESIDE_REASONING = re.compile(r"\s*(</?think>|\[/?THINK\])\s*")
_NAMED = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?\[ARGS\]\s*\Z")
_MARKS = re.compile(r"(?:<[^<>\s=]+>|\[/?[A-Z_]+\]|[\[\],;]|\s)*\Z")


def calls_in(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """What stands before the first call in a reply's text, and the calls; none is no call.

    A call is an object with a name and arguments, or an object behind a name and ``[ARGS]``.
    """
    calls: list[ToolCall] = []
    before, last = text, 0
    for start, end, value in _objects(text):
        named = _NAMED.search(text, last, start)
        call = ToolCall(named[1], text[start:end]) if named else _call(value)
        if call is not None:
            if not calls:
                before = text[last : named.start() if named else start]
            calls.append(call)
            last = end
    if not calls:
        return text, ()
    marks = _MARKS.search(before)
    return before[: marks.start()] if marks else before, tuple(calls)


def same_spoken(one: str, other: str) -> bool:
    """Whether two texts are equal but for the spelling of JSON objects and white space beside.

    Beside the marks of reasoning too: templates write them each in their own way. Values in tags
    are equal only to the character: nothing in them says whether they are JSON.
    """
    return one == other or _one_spelling(one) == _one_spelling(other)


def _one_spelling(text: str) -> str:
    parts: list[str] = []
    last = 0
    for call in tagged_calls(text):
        written = json.dumps([call.name, call.values], sort_keys=True)
        parts += (_untagged(text[last : call.start]), written)
        last = call.end
    parts.append(_untagged(text[last:]))
    return "\n".join(parts)


def _untagged(text: str) -> str:
    parts: list[str] = []
    last = 0
    for start, end, value in _objects(text):
        parts.append(_plain(text[last:start]))
        parts.append(json.dumps(value, sort_keys=True))
        last = end
    parts.append(_plain(text[last:]))
    return "\n".join(parts)


def _plain(text: str) -> str:
    return _SPACE.sub(" ", _BESIDE_REASONING.sub(r"\1", text)).strip()


def _call(value: dict[str, Any]) -> ToolCall | None:
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not isinstance(arguments, dict | str | None):
        return None
    if "arguments" not in value and "parameters" not in value:
        return None
    return ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments or {}))


def _objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Whole JSON objects in a text, outermost ones, with where they begin and end."""
    tries, at = 0, text.find("{")
    while at >= 0 and tries < _MAX_TRIES:
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            tries += 1
            end = at + 1
        else:
            yield at, end, value
        at = text.find("{", end)
