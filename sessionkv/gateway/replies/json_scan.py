"""Follows one JSON value character by character and says at once where it stops being JSON.

As strict as JSON is, but for control characters inside strings, which models forget to escape:
:meth:`JsonScanner.push` gives them back escaped. Also refused is what could not be handed on: lone
surrogates, numbers that are not finite, absurd nesting. Knows nothing of what the value means.
"""

from __future__ import annotations

import enum
import json
import math
import re

MAX_DEPTH = 64
"""Containers inside one another; the engine takes fewer in any request."""
_MAX_SCALAR_CHARS = 256
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = " \t\n\r"
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_SCALAR_CHARS = frozenset("-+.0123456789eEtrufalsn")


class NotJson(ValueError):
    """The character that was pushed cannot stand there."""


class Expects(enum.Enum):
    """What may come next."""

    VALUE = enum.auto()
    FIRST_ITEM = enum.auto()  # a value, or the end of a list
    KEY = enum.auto()
    FIRST_KEY = enum.auto()  # a key, or the end of an object
    COLON = enum.auto()
    NEXT = enum.auto()  # a comma or the end of the container
    STRING = enum.auto()  # inside one
    ESCAPE = enum.auto()
    SCALAR = enum.auto()  # inside a number, true, false or null
    NOTHING = enum.auto()  # the value is complete


class JsonScanner:
    """One value. O(1) a character.

    Attributes:
        expects: What may come next.
        depth: Containers that are open.
    """

    __slots__ = ("_in_key", "_open", "_token", "expects")

    def __init__(self) -> None:
        """Start before the value."""
        self.expects = Expects.VALUE
        self._token: list[str] = []
        self._open: list[str] = []
        self._in_key = False

    @property
    def depth(self) -> int:
        """Containers that are open."""
        return len(self._open)

    @property
    def token(self) -> str:
        """Raw text of the last string or scalar, as far as it has come. O(its length)."""
        return "".join(self._token)

    def push_plain(self, text: str, at: int) -> int:
        """Take what is plain text inside a string, at once; returns how much, 0 elsewhere."""
        match = _PLAIN.match(text, at) if self.expects is Expects.STRING else None
        if match is None:
            return 0
        self._token.append(match[0])
        return len(match[0])

    def push(self, char: str) -> str:
        """Take the next character.

        Returns:
            What to write for it: itself, or its escape where it had to be escaped.

        Raises:
            NotJson: It cannot stand there; the scanner is of no use any more.
        """
        match self.expects:
            case Expects.STRING:
                return self._in_string(char)
            case Expects.ESCAPE:
                self._token.append(char)
                self.expects = Expects.STRING  # a wrong escape is found when the string ends
            case Expects.SCALAR if char in _SCALAR_CHARS:
                self._token.append(char)
                if len(self._token) > _MAX_SCALAR_CHARS:
                    raise NotJson
            case Expects.SCALAR:
                _check_scalar(self.token)
                self._value_ends()
                return self.push(char)
            case _ if char not in _SPACE:
                self._structure(char)
            case _:
                pass
        return char

    def _structure(self, char: str) -> None:
        expects = self.expects
        if expects in (Expects.VALUE, Expects.FIRST_ITEM):
            if char == "]" and expects is Expects.FIRST_ITEM:
                self._close("[")
            else:
                self._value(char)
        elif expects in (Expects.KEY, Expects.FIRST_KEY):
            if char == "}" and expects is Expects.FIRST_KEY:
                self._close("{")
            elif char == '"':
                self._begin_string(is_key=True)
            else:
                raise NotJson
        elif expects is Expects.COLON and char == ":":
            self.expects = Expects.VALUE
        elif expects is Expects.NEXT and char == ",":
            self.expects = Expects.KEY if self._open[-1] == "{" else Expects.VALUE
        elif expects is Expects.NEXT and char in "]}":
            self._close("[" if char == "]" else "{")
        else:
            raise NotJson

    def _value(self, char: str) -> None:
        if char in "{[":
            if len(self._open) == MAX_DEPTH:
                raise NotJson
            self._open.append(char)
            self.expects = Expects.FIRST_KEY if char == "{" else Expects.FIRST_ITEM
        elif char == '"':
            self._begin_string(is_key=False)
        elif char in "-0123456789tfn":
            self._token, self.expects = [char], Expects.SCALAR
        else:
            raise NotJson

    def _begin_string(self, *, is_key: bool) -> None:
        self._token, self.expects, self._in_key = ['"'], Expects.STRING, is_key

    def _in_string(self, char: str) -> str:
        if char < " ":
            char = json.dumps(char)[1:-1]
        self._token.append(char)
        if char == "\\":
            self.expects = Expects.ESCAPE
        elif char == '"':
            text_of(self.token)
            if self._in_key:
                self.expects = Expects.COLON
            else:
                self._value_ends()
        return char

    def _close(self, opened: str) -> None:
        if self._open.pop() != opened:
            raise NotJson
        self._value_ends()

    def _value_ends(self) -> None:
        self.expects = Expects.NEXT if self._open else Expects.NOTHING


def text_of(token: str) -> str:
    """What a JSON string says.

    Raises:
        NotJson: It is none, or holds a lone surrogate.
    """
    try:
        text = json.loads(token)
        text.encode()
    except ValueError:
        raise NotJson from None
    return str(text)


def _check_scalar(token: str) -> None:
    if token in ("true", "false", "null"):
        return
    if not _NUMBER.fullmatch(token) or not math.isfinite(float(token)):
        raise NotJson
