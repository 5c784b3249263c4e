"""Finds the tool calls in a reply's text, in the form that a model's template taught it.

::

    TEXT --mark--> OPENED --{--> CALL --}--> AFTER --more of the form--> CALL
      ^               |            |           |
      `---------------+------------+-----------'  whatever is no call after all: told as text

Whitespace beside a call belongs to the form and is not told.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sessionkv.gateway.replies.call_reader import CALL_KEYS, CallReader
from sessionkv.gateway.replies.events import (
    CallArguments,
    CallBegins,
    CallEnds,
    ReplyEvent,
    Text,
)
from sessionkv.gateway.replies.held import longest_start
from sessionkv.gateway.replies.json_scan import NotJson
from sessionkv.gateway.replies.xml_call import Schemas, XmlCallReader

_ARGUMENTS_MARK, _ID_MARK = "[ARGS]", "[CALL_ID]"
_MAX_NAME_CHARS = 512


@dataclass(frozen=True, slots=True)
class CallForm:
    """How one family of models writes calls.

    Attributes:
        mark: What announces a call.
        closer: What may stand behind one.
        separator: What may stand between two objects without a mark of their own.
        has_bare: An object at the reply's start may be a call without any mark.
        has_lists: The mark may stand before a list of calls, or before a tool's name.
        has_tags: Behind the mark stand tags, not an object.
    """

    mark: str
    closer: str = ""
    separator: str = ""
    has_bare: bool = False
    has_lists: bool = False
    has_tags: bool = False


FORMS: Mapping[str, CallForm] = {
    "hermes": CallForm("<tool_call>", closer="</tool_call>"),
    "llama3": CallForm("<|python_tag|>", separator=";", has_bare=True),
    "mistral": CallForm("[TOOL_CALLS]", has_lists=True),
    "qwen3_coder": CallForm("<tool_call>", closer="</tool_call>", has_tags=True),
}


class _At(enum.Enum):
    START = enum.auto()  # nothing but space so far, where a bare call may come
    TEXT = enum.auto()
    OPENED = enum.auto()  # behind a mark; a list may have been opened too
    NAME = enum.auto()
    CALL = enum.auto()
    AFTER = enum.auto()


class CallFinder:
    """Takes one reply's text apart. O(text).

    Attributes:
        begun: Calls that have begun.
        complete: Calls that are complete.
        first_end: After how many characters the first complete call ends, with all that belongs to
            its form; None until that is certain.
        is_beside: What comes next stands beside a call or reasoning: space before it is not told.
    """

    __slots__ = (
        "_at",
        "_closed_at",
        "_form",
        "_held",
        "_in_list",
        "_name",
        "_new_id",
        "_num_taken",
        "_only_one",
        "_reader",
        "_schemas",
        "_space",
        "begun",
        "complete",
        "first_end",
        "is_beside",
    )

    def __init__(
        self,
        style: str | None,
        new_id: Callable[[], str],
        *,
        only_one: bool = False,
        schemas: Schemas | None = None,
    ) -> None:
        """Start before the text.

        Args:
            style: Of :data:`FORMS`; None where all is text.
            new_id: Makes an id for each call.
            only_one: What follows the first call is text whatever it looks like.
            schemas: Of the tools' arguments.
        """
        self._form = CallForm("") if style is None else FORMS[style]
        self._new_id = new_id
        self._only_one = only_one
        self._schemas = schemas or {}
        self._at = _At.START if self._form.has_bare else _At.TEXT
        self._held = ""  # raw text of which is not known yet whether it is a call
        self._space = ""  # space of which is not known yet whether it is beside a call
        self._in_list = False
        self._name: str | None = None
        self._reader: CallReader | XmlCallReader = CallReader()
        self.begun = self.complete = 0
        self.first_end: int | None = None
        self._num_taken = 0
        self._closed_at = 0  # characters up to where the last object closed
        self.is_beside = False

    def feed(self, text: str) -> list[ReplyEvent]:
        """Take the next piece."""
        events: list[ReplyEvent] = []
        at = 0
        while at < len(text):
            if self._at is _At.TEXT:
                size = self._scan(text[at:], events)
            elif self._at is _At.CALL:
                size = self._plain(text, at, events) or self._in_call(text[at], events)
            else:
                size = self._take(text[at], events)
            at += size
            self._num_taken += size
            if self.complete and self.first_end is None:
                self._find_first_end(is_taken=size > 0)
        return events

    def end(self) -> list[ReplyEvent]:
        """The text is over: what was held back. A call that is not complete stays so."""
        events: list[ReplyEvent] = []
        is_tail = self._at is _At.CALL and self._reader.has_begun
        if self._at is not _At.AFTER and not is_tail:
            self._give_up(events)
        if self._space and not self.is_beside:
            events.append(Text(self._space))
        self._space = self._held = ""
        return events

    def _find_first_end(self, *, is_taken: bool) -> None:
        """The first call is complete: see whether more of its form can follow."""
        if self._at is _At.AFTER:
            if not self._held:
                self._closed_at = self._num_taken
            may_close = self._form.closer or self._in_list
            if not may_close or self._held.strip() == ",":
                self.first_end = self._closed_at
        elif self._at is _At.TEXT:  # led there by the form's last character, or by one of no form
            self.first_end = self._num_taken if is_taken else self._closed_at or self._num_taken

    def _scan(self, text: str, events: list[ReplyEvent]) -> int:
        """Look for a mark; returns how much of ``text`` was taken."""
        mark, held = self._form.mark, len(self._held)
        if self._only_one and self.complete:
            mark = ""
        data, self._held = self._held + text, ""
        found = data.find(mark) if mark else -1
        if found < 0:
            size = len(data) - longest_start(data, mark)
            self._held = data[size:]
            self._say(data[:size], events)
            return len(text)
        self._say(data[:found], events)
        self._held, self._at = mark, _At.OPENED
        self._in_list, self._name = False, None
        return found + len(mark) - held

    def _take(self, char: str, events: list[ReplyEvent]) -> int:
        """One character between; 0 where it has to be looked at again in the next state."""
        is_taken = char.isspace() or {
            _At.START: self._at_start,
            _At.OPENED: self._opened,
            _At.NAME: self._in_name,
            _At.AFTER: self._after,
        }[self._at](char)
        return self._go_on(char, events) if is_taken else self._give_up(events)

    def _go_on(self, char: str, events: list[ReplyEvent]) -> int:
        """The character belongs to the state that it led to."""
        if self._at is _At.CALL:
            return self._in_call(char, events)
        if self._at is not _At.TEXT:
            self._held += char
        return 1

    def _at_start(self, char: str) -> bool:
        return char == "{" and self._begin(CallReader(only=CALL_KEYS))

    def _opened(self, char: str) -> bool:
        if self._form.has_tags:
            return char == "<" and self._begin(XmlCallReader(self._schemas))
        if char == "{":
            return self._begin(CallReader(name=self._name))
        if self._name is not None or not self._form.has_lists or self._in_list:
            return False
        self._in_list = char == "["
        self._at = _At.OPENED if self._in_list else _At.NAME
        return True

    def _in_name(self, char: str) -> bool:
        if len(self._held) > _MAX_NAME_CHARS or char == "{":
            return False
        if (self._held + char).endswith(_ARGUMENTS_MARK):
            written = (self._held + char)[len(self._form.mark) : -len(_ARGUMENTS_MARK)]
            self._name = written.partition(_ID_MARK)[0].strip()
            self._at = _At.OPENED
        return bool(self._name) or self._at is _At.NAME

    def _after(self, char: str) -> bool:
        form, held = self._form, self._held.strip()
        if self._in_list:
            if char == "]" and not held:
                self._at, self._held = _At.TEXT, ""
                return True
            if self._only_one:
                return False
            if char == "{" and held == ",":
                return self._begin(CallReader())
            return char == "," and not held
        if form.separator and not self._only_one:
            if char == "{":
                return self._begin(CallReader(only=CALL_KEYS))
            return char == form.separator and not held
        if form.closer.startswith(held + char):
            if form.closer == held + char:
                self._at, self._held = _At.TEXT, ""
            return True
        return False

    def _begin(self, reader: CallReader | XmlCallReader) -> bool:
        self._reader, self._at = reader, _At.CALL
        return True

    def _plain(self, text: str, at: int, events: list[ReplyEvent]) -> int:
        """As much of a string as is there: most of a call."""
        reader = self._reader
        size = reader.push_plain(text, at)
        if size and reader.has_begun and not reader.is_complete:
            if arguments := reader.take():
                events.append(CallArguments(self.begun - 1, arguments))
        elif size:
            self._held += text[at : at + size]
        return size

    def _in_call(self, char: str, events: list[ReplyEvent]) -> int:
        reader = self._reader
        had_begun, was_complete = reader.has_begun, reader.is_complete
        try:
            reader.push(char)
        except NotJson:
            return self._give_up(events)
        self._held += char
        if reader.has_begun and not had_begun:
            events.append(CallBegins(self.begun, self._new_id(), reader.name or ""))
            self.begun += 1
            self._space, self.is_beside = "", True
        if reader.has_begun and not was_complete:
            if arguments := reader.take():
                events.append(CallArguments(self.begun - 1, arguments))
            self._held = ""
        if reader.is_complete and not was_complete:
            events.append(CallEnds(self.begun - 1))
            self.complete += 1
        if reader.is_closed:
            self._at, self._held = _At.AFTER, ""
        return 1

    def _give_up(self, events: list[ReplyEvent]) -> int:
        """What is held is no call: it is text, in whose last characters a mark may begin."""
        held, self._held = self._held, ""
        was_after, self._at = self._at is _At.AFTER, _At.TEXT
        if was_after:
            self._scan(held, events)
        else:
            self._say(held, events)
        return 0

    def _say(self, text: str, events: list[ReplyEvent]) -> None:
        text = self._space + text
        if self.is_beside:
            text = text.lstrip()
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self.is_beside = False
            events.append(Text(body))
