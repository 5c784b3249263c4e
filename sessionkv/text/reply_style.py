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
_CALL = ToolCall(_NAME, '{"city": "Oslo"}', "call00001")
_CALLING = Message("assistant", "", tool_calls=(_CALL,))
_RESULT = Message("tool", "cold", name=_NAME, tool_call_id="call00001")
_TOOLS = '[{"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}]'
_OBJECT = r'\{(?:[^{}]|\{[^{}]*\})*"name"\s*:\s*"'  # up to the name, whatever stands before it
_BEFORE_NAME: Mapping[str, re.Pattern[str]] = {
    "hermes": re.compile(rf"<tool_call>\s*{_OBJECT}$"),
    "qwen3_coder": re.compile(r"<tool_call>\s*<function=$"),
    "mistral": re.compile(rf"\[TOOL_CALLS\]\s*(\[\s*{_OBJECT})?$"),
    "llama3": re.compile(rf"\A\s*(<\|python_tag\|>)?\s*{_OBJECT}$"),
}
_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def find_reply_style(renderer: ChatRenderer, source: str) -> ReplyStyle:
    """Try a template out.

    Args:
        renderer: Of the template.
        source: Its text.
    """
    marks = next((marks for marks in _REASONING if marks[1] in source), None)
    prompt = renderer.try_render((_USER,)) or ""
    calls = _calls(renderer)
    return ReplyStyle(
        tool_calls=calls,
        reasoning=marks,
        starts_in_reasoning=marks is not None and prompt.rstrip().endswith(marks[0]),
        single_call=calls is not None and _refuses_two(renderer),
    )


def _refuses_two(renderer: ChatRenderer) -> bool:
    """Whether one call is taken and two are not."""
    two = replace(_CALLING, tool_calls=(*_CALLING.tool_calls, replace(_CALL, id="call00002")))
    one, more = (renderer.try_render((_USER, call), generation=False) for call in (_CALLING, two))
    return one is not None and more is None


def _calls(renderer: ChatRenderer) -> str | None:
    calling = (_CALLING, replace(_CALLING, content=None))
    for messages in ((_USER, call, *rest) for call in calling for rest in ((_RESULT,), ())):
        for tools in (_TOOLS, None):
            prompt = renderer.try_render((_USER,), tools) or ""
            text = renderer.try_render(messages, tools, generation=False) or ""
            before, found, _ = text.partition(_NAME)
            reply = _behind(prompt, before) if found else ""
            for style, pattern in _BEFORE_NAME.items():
                if pattern.search(reply):
                    return style
    return None


def _behind(prompt: str, text: str) -> str:
    """What of a text is the reply to the prompt; one that opens otherwise begins its line anew."""
    if text.startswith(prompt):
        return text[len(prompt) :]
    pairs = enumerate(zip(prompt, text, strict=False))
    shared = next((i for i, (one, other) in pairs if one != other), 0)
    return text[text.rfind("\n", 0, shared) + 1 :]
