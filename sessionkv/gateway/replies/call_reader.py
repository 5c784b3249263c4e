"""Reads one tool call that a model writes as a JSON object with a name and arguments.

The call begins for the reader's owner when its name is known and its arguments have begun, so what
only resembles a call is known to be none before anything was said of it. It is complete with its
arguments: what the object has behind them changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from sessionkv.gateway.replies.json_scan import Expects, JsonScanner, NotJson, text_of

ARGUMENT_KEYS = ("arguments", "parameters")
CALL_KEYS = frozenset((*ARGUMENT_KEYS, "name", "type", "id"))
"""All that an object has which is a call though nothing marks it as one."""


class CallReader:
    """One object, character by character; the first one pushed is its brace.

    Attributes:
        name: Of the tool, None until it is known.
        has_begun: The name is known, and the arguments have begun.
        is_complete: Name and arguments are known.
    """

    __slots__ = (
        "_has_arguments",
        "_key",
        "_keys",
        "_only",
        "_outer",
        "_parts",
        "_scanner",
        "_value",
        "is_complete",
        "name",
    )

    def __init__(self, only: Collection[str] = (), *, name: str | None = None) -> None:
        """Start before the object.

        Args:
            only: Keys that it may have; empty for any.
            name: Where the name stands before the object, which then is the arguments themselves.
        """
        self.name = name
        self.is_complete = False
        self._only = only
        self._scanner = JsonScanner()
        self._key: str | None = None  # of the value that is being read
        self._keys: set[str] = set()
        self._parts: list[str] = []  # of the arguments, not yet taken
        self._has_arguments = False
        # What is being read at the object's top: "arguments", "text", "other" or nothing.
        self._value = "" if name is None else "arguments"
        self._outer = 1 if name is None else 0  # containers around the arguments

    @property
    def has_begun(self) -> bool:
        """The name is known, and the arguments have begun."""
        return self.name is not None and self._has_arguments

    @property
    def is_closed(self) -> bool:
        """The object has ended."""
        return self._scanner.expects is Expects.NOTHING

    def take(self) -> str:
        """What has come of the arguments' JSON since it was asked for last."""
        text = "".join(self._parts)
        self._parts.clear()
        return text

    def push_plain(self, text: str, at: int) -> int:
        """Take what is plain text inside a string, at once; returns how much, 0 elsewhere."""
        size = self._scanner.push_plain(text, at)
        if size and self._value == "arguments":
            self._add(text[at : at + size])
        return size

    def push(self, char: str) -> None:
        """Take the next character.

        Raises:
            NotJson: The object is no call, or no JSON. What was taken before stays so.
        """
        scanner = self._scanner
        before, depth = scanner.expects, scanner.depth
        written = scanner.push(char)
        if self._value == "arguments":
            self._add(written)
            if scanner.depth == self._outer:
                self._value_ends()
        elif depth == 1:
            self._at_the_top(before, char)
        if self.is_closed and not self.is_complete:
            self._ends_without_arguments()

    def _add(self, text: str) -> None:
        self._parts.append(text)
        self._has_arguments = True

    def _at_the_top(self, before: Expects, char: str) -> None:
        scanner = self._scanner
        if scanner.expects is Expects.COLON and before is Expects.STRING:
            self._key = text_of(scanner.token)
            if self._key in self._keys or (self._only and self._key not in self._only):
                raise NotJson
            self._keys.add(self._key)
        elif before is Expects.VALUE and scanner.expects is not Expects.VALUE:
            self._value_begins(char)
        elif self._value and scanner.depth <= 1 and scanner.expects in (
            Expects.NEXT, Expects.KEY, Expects.NOTHING,
        ):  # fmt: skip
            self._value_ends()

    def _value_begins(self, char: str) -> None:
        is_arguments = self._key in ARGUMENT_KEYS
        if is_arguments and self._keys.issuperset(ARGUMENT_KEYS):
            raise NotJson
        if is_arguments and char == "{":
            self._value = "arguments"
            self._add(char)
        elif char == '"':
            self._value = "text"
        elif self._key == "name" or (is_arguments and char != "n"):
            raise NotJson
        else:
            self._value = "other"

    def _value_ends(self) -> None:
        kind, self._value = self._value, ""
        if kind == "text" and self._key == "name":
            self.name = text_of(self._scanner.token)
            if not self.name:
                raise NotJson
        elif kind == "text" and self._key in ARGUMENT_KEYS:
            self._add(_object_text(text_of(self._scanner.token)))
        elif kind == "other" and self._key in ARGUMENT_KEYS:
            self._add("{}")
        self.is_complete = self.has_begun

    def _ends_without_arguments(self) -> None:
        """A call without arguments is one all the same where a mark announced it."""
        if self.name is None or self._only:
            raise NotJson
        self._add("{}")
        self.is_complete = True


def _object_text(text: str) -> str:
    """Arguments that were written as a JSON string.

    Raises:
        NotJson: The string holds no object.
    """
    if not text.strip():
        return "{}"
    scanner = JsonScanner()
    written = "".join(map(scanner.push, text))
    if scanner.expects is not Expects.NOTHING or not isinstance(json.loads(written), dict):
        raise NotJson
    return written
