"""Conversations as a model's template sees them.

:class:`ChatRenderer` turns frozen messages into raw text (see :mod:`sessionkv.text.control`) the
way the template wants them. What the template wants is found out once, in
:mod:`sessionkv.text.habits`. Knows nothing of token ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sessionkv.errors import TemplateRefused
from sessionkv.text.control import ControlMarks
from sessionkv.text.messages import Message, ToolCall, call_map
from sessionkv.text.template import ChatTemplate


@dataclass(frozen=True, slots=True)
class TemplateHabits:
    """How a template wants its messages and what it puts around replies.

    Attributes:
        folds_system: It refuses or ignores system messages: theirs goes before the first user
            message's text.
        folds_later_system: It refuses or ignores those behind other messages: they are the user's.
        joins_users: It refuses messages of the user in a row: they are one, a blank line between
            their texts.
        null_content: It takes messages whose content is None.
        map_arguments: It takes tool arguments as a map, not as JSON text.
        closing: What it writes after a reply up to and including one control token; ``""`` where
            it has no single end of turn.
        closing_token: That control token, ``""`` where there is none.
        opening: What stands before every reply, after whatever message.
        calling: What a reply's text shows before the name of a tool it calls; ``""`` where that is
            not known, or too short to tell.
        reads_thoughts: It takes thoughts at the start of a reply's text for what they are.
    """

    folds_system: bool = False
    folds_later_system: bool = False
    joins_users: bool = False
    null_content: bool = False
    map_arguments: bool = True
    closing: str = ""
    closing_token: str = ""
    opening: str = ""
    calling: str = ""
    reads_thoughts: bool = False


class ChatRenderer:
    """Renders messages with one template. Immutable."""

    def __init__(self, template: ChatTemplate, marks: ControlMarks, habits: TemplateHabits) -> None:
        """Combine the three."""
        self._template = template
        self.marks = marks
        self.habits = habits

    def render(
        self,
        messages: Sequence[Message],
        tools_json: str | None = None,
        *,
        now_s: float = 0.0,
        generation: bool = True,
    ) -> str:
        """Raw text of a conversation. O(its length).

        Args:
            messages: All of it.
            tools_json: From :func:`~sessionkv.text.messages.freeze_tools`.
            now_s: Where the template's clock stands, in wall-clock seconds.
            generation: End with the opening of the assistant's next message.

        Raises:
            TemplateRefused: With the template's own words.
        """
        messages = self._arranged(messages)
        tools = None if tools_json is None else self.marks.mark_value(json.loads(tools_json))
        maps = [self._message_map(message) for message in messages]
        return self._template.render(maps, tools, now_s=now_s, generation=generation)

    def try_render(
        self,
        messages: Sequence[Message],
        tools_json: str | None = None,
        *,
        now_s: float = 0.0,
        generation: bool = True,
    ) -> str | None:
        """As :meth:`render`; None where the template refuses."""
        try:
            return self.render(messages, tools_json, now_s=now_s, generation=generation)
        except TemplateRefused:
            return None

    def _arranged(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages in an order of roles that the template takes.

        Each depends on those before it alone, so that more of them change no earlier text.
        """
        if self.habits.folds_later_system:
            messages = [*messages[:1], *map(_as_users, messages[1:])]
        if self.habits.folds_system:
            messages = _fold_system(messages)
        return _join_users(messages) if self.habits.joins_users else messages

    def _message_map(self, message: Message) -> dict[str, Any]:
        value: dict[str, Any] = self.marks.mark_value(replace(message, tool_calls=()).to_map())
        if value["content"] is None and not self.habits.null_content:
            value["content"] = ""
        if message.tool_calls:
            value["tool_calls"] = [self.marks.mark_value(self._call(c)) for c in message.tool_calls]
        return value

    def _call(self, call: ToolCall) -> dict[str, Any]:
        parsed = call.parsed() if self.habits.map_arguments else None
        return call_map(call, call.arguments if parsed is None else parsed)


def _fold_system(messages: Sequence[Message]) -> Sequence[Message]:
    """Put a leading system text before the first user message's, a blank line between them."""
    if len(messages) < 2 or messages[0].role != "system" or messages[1].role != "user":
        return messages
    system, user, *rest = messages
    return (replace(user, content=f"{system.content}\n\n{user.content}"), *rest)


def _as_users(message: Message) -> Message:
    return replace(message, role="user") if message.role == "system" else message


def _join_users(messages: Sequence[Message]) -> Sequence[Message]:
    joined: list[Message] = []
    for message in messages:
        if joined and joined[-1].role == message.role == "user":
            message = replace(message, content=f"{joined.pop().content}\n\n{message.content}")
        joined.append(message)
    return joined
