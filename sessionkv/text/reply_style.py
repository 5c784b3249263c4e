"""Finds out from a template how the model writes tool calls and reasoning.

A template writes earlier tool calls the way in which the model was taught to write them, so one is
rendered, and what stands around the tool's name is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from sessionkv.text.conversation import ChatRenderer
from sessionkv.text.messages import Message, ToolCall
from sessionkv.types.reply_style import ReplyStyle

_USER = Message("user", "hello")
_NAME = "look_up_weather"
_CALLING = Message("assistant", "", tool_calls=(ToolCall(_NAME, '{"city": "Oslo"}', "call00001"),))
_RESULT = Message("tool", "cold", name=_NAME, tool_call_id="call00001")
_TOOLS = '[{"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}]'
_BEFORE_NAME: Mapping[str, re.Pattern[str]] = {
    "hermes": re.compile(r'<tool_call>\s*\{\s*"name"\s*:\s*"$'),
    "mistral": re.compile(r'\[TOOL_CALLS\]\s*(\[\s*\{\s*"name"\s*:\s*")?$'),
    "llama3": re.compile(r'\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"$'),
}
_SHOWN_CHARS = 80
_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def find_reply_style(renderer: ChatRenderer, source: str) -> ReplyStyle:
    """Try a template out.

    Args:
        renderer: Of the template.
        source: Its text.
    """
    marks = next((marks for marks in _REASONING if marks[1] in source), None)
    prompt = renderer.try_render((_USER,)) or ""
    return ReplyStyle(
        tool_calls=_calls(renderer),
        reasoning=marks,
        starts_in_reasoning=marks is not None and prompt.rstrip().endswith(marks[0]),
    )


def _calls(renderer: ChatRenderer) -> str | None:
    calling = (_CALLING, replace(_CALLING, content=None))
    for messages in ((_USER, call, *rest) for call in calling for rest in ((_RESULT,), ())):
        for tools in (_TOOLS, None):
            text = renderer.try_render(messages, tools, generation=False) or ""
            before, found, _ = text.partition(_NAME)
            shown = before[-_SHOWN_CHARS:] if found else ""
            for style, pattern in _BEFORE_NAME.items():
                if pattern.search(shown):
                    return style
    return None
