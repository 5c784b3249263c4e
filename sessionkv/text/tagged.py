"""Tool calls that a model writes as tags, a parameter each, beside the parsed ones clients send.

::

    <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>

Space between tags counts for nothing, nor does one line break at either end of a value; all else of
a value does. Values have no quotes, so ``3`` may be a number or a text: here one is only compared
with what it is told to be. What a client was told is decided elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sessionkv.text.messages import ToolCall

_FUNCTION = re.compile(r"<tool_call>\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
_VALUE_END = "</parameter>"
_END = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
_WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "null": None, "none": None}
"""As JSON writes them, and as templates write Python's."""


@dataclass(frozen=True, slots=True)
class TaggedCall:
    """A whole call in a text.

    Attributes:
        start: Where its first tag begins.
        end: Where its last tag ends.
        name: Of the tool.
        values: As they are written, by parameter.
    """

    start: int
    end: int
    name: str
    values: Mapping[str, str]


def tagged_calls(text: str) -> Iterator[TaggedCall]:
    """Whole calls in a text, first to last. O(text)."""
    at = 0
    while (found := _FUNCTION.search(text, at)) is not None:
        call = _call(text, found)
        if call is not None:
            yield call
        at = found.end() if call is None else call.end


def read_tagged(text: str, told: Sequence[ToolCall]) -> tuple[str, tuple[ToolCall, ...]]:
    """What stands before the calls that a reply ends with, and the calls; none is no call.

    Args:
        text: Of the reply.
        told: The calls that it may be: a value that says what theirs does is read as theirs.
    """
    calls = list(tagged_calls(text))
    starts = [*(call.start for call in calls[1:]), len(text)]
    if not calls or any(
        text[call.end : start].strip() for call, start in zip(calls, starts, strict=True)
    ):
        return text, ()
    known = [call.parsed() or {} for call in told[: len(calls)]]
    known += [{}] * (len(calls) - len(known))
    read = [
        ToolCall(call.name, json.dumps(_typed(call.values, values), ensure_ascii=False))
        for call, values in zip(calls, known, strict=True)
    ]
    return text[: calls[0].start], tuple(read)


def _call(text: str, found: re.Match[str]) -> TaggedCall | None:
    name, at, values = found[1].strip(), found.end(), dict[str, str]()
    while (parameter := _PARAMETER.match(text, at)) is not None:
        key, start = parameter[1].strip(), parameter.end()
        end = text.find(_VALUE_END, start)
        if end < 0 or not key or key in values:
            return None
        values[key] = text[start:end].removesuffix("\n")
        at = end + len(_VALUE_END)
    last = _END.match(text, at)
    return TaggedCall(found.start(), last.end(), name, values) if last and name else None


def _typed(written: Mapping[str, str], told: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: told[key] if key in told and _says(text, told[key]) else text
        for key, text in written.items()
    }


def _says(text: str, value: Any) -> bool:
    """Whether a text stands for a value: text for itself, anything else for its JSON."""
    if isinstance(value, str):
        return text == value
    bare = text.strip()
    try:
        said = _WORDS[bare.lower()] if bare.lower() in _WORDS else json.loads(bare)
        return _spelled(said) == _spelled(value)
    except (ValueError, RecursionError):
        return False


def _spelled(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)
