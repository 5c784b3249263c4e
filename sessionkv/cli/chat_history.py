"""What was said in a conversation, as lines for the terminal. Knows no engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from sessionkv.cli import output

_LINES = 6
_CHARS = 600
"""About as much of a long message as reminds of it: some lines of a terminal."""
_Messages = Sequence[Mapping[str, Any]]


def history_lines(messages: _Messages) -> Iterator[str]:
    """Every message, each behind its role."""
    for message in messages:
        yield from _spoken(message, _text(message))


def last_exchange(messages: _Messages) -> Iterator[str]:
    """The last message of the user and what came after it, long ones cut.

    Ends with a line on where the rest is, where something was left out.
    """
    asked = [at for at, message in enumerate(messages) if message.get("role") == "user"]
    if not asked:
        return
    left_out = any(message.get("role") == "user" for message in messages[: asked[-1]])
    for message in messages[asked[-1] :]:
        whole = _text(message)
        shown = _cut(whole)
        left_out |= shown != whole
        yield from _spoken(message, shown)
    if left_out:
        yield "(/history shows all of it)"


def _spoken(message: Mapping[str, Any], text: str) -> Iterator[str]:
    first, *others = text.split("\n")
    yield output.one_line(f"{message.get('role', '?')}: {first}")
    yield from map(output.one_line, others)


def _text(message: Mapping[str, Any]) -> str:
    """Its text, and the names of the tools that it calls."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(str(part.get("text", "")) for part in content)
    calls = (
        call.get("function", call).get("name", "?") for call in message.get("tool_calls") or ()
    )
    return "\n".join([*([content] if content else []), *(f"(calls {name})" for name in calls)])


def _cut(text: str) -> str:
    shown = "\n".join(islice(text.split("\n"), _LINES))[:_CHARS]
    return text if shown == text else f"{shown.rstrip()} ..."
