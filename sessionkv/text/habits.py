"""Finds out a template's habits by rendering a dozen tiny conversations, once, at load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sessionkv.text.control import ControlMarks
from sessionkv.text.conversation import ChatRenderer, TemplateHabits
from sessionkv.text.messages import Message, ToolCall
from sessionkv.text.template import ChatTemplate
from sessionkv.text.vocabulary import REPLY_MARKS

REPLY = "REPLYTEXT"
"""Stands for a reply where the question is what the template puts around one."""

USER = Message("user", "hello")
ANSWER = Message("assistant", REPLY)
TOOL_RESULT = Message("tool", "result", name="look", tool_call_id="call00001")
_SYSTEM = "SYSTEMTEXT"
_LATER = Message("system", _SYSTEM)
_LEAST_CALLING = 4
"""Fewer characters may stand in any text."""
_CALLING = Message(
    "assistant", "", tool_calls=(ToolCall("look", '{"city": "Oslo", "n": 2}', "call00001"),)
)


def find_habits(template: ChatTemplate, marks: ControlMarks) -> TemplateHabits:
    """Try the template out. A template that refuses everything has the default habits."""
    habits = TemplateHabits()
    habits = replace(habits, folds_system=_refuses_system(ChatRenderer(template, marks, habits)))
    habits = replace(habits, joins_users=_refuses_users(ChatRenderer(template, marks, habits)))
    later = _refuses_later_system(ChatRenderer(template, marks, habits))
    habits = replace(habits, folds_later_system=later)
    habits = replace(habits, map_arguments=_takes_maps(ChatRenderer(template, marks, habits)))
    nulls = ChatRenderer(template, marks, replace(habits, null_content=True))
    renderer = ChatRenderer(template, marks, habits)
    closing, token = _closing(renderer, marks)
    return replace(
        habits,
        null_content=_takes_null(renderer, nulls),
        closing=closing,
        closing_token=token,
        opening=_opening(renderer),
        calling=_calling_text(renderer, marks),
        reads_thoughts=_reads_thoughts(renderer),
    )


def _refuses_system(renderer: ChatRenderer) -> bool:
    text = renderer.try_render((Message("system", _SYSTEM), USER))
    return (text is None or _SYSTEM not in text) and renderer.try_render((USER,)) is not None


def _refuses_users(renderer: ChatRenderer) -> bool:
    """Two of the user's in a row, as agents send their surroundings and then what is asked."""
    text = renderer.try_render((USER, replace(USER, content="other")))
    return text is None and renderer.try_render((USER, ANSWER, USER)) is not None


def _refuses_later_system(renderer: ChatRenderer) -> bool:
    """As agents send them behind the user's first message, or when their surroundings change."""
    texts = [
        renderer.try_render(messages) for messages in ((USER, _LATER), (USER, ANSWER, _LATER, USER))
    ]
    is_shown = all(text is not None and _SYSTEM in text for text in texts)
    return not is_shown and renderer.try_render((USER, ANSWER, USER)) is not None


def _takes_maps(renderer: ChatRenderer) -> bool:
    """A map that comes out in Python's spelling was concatenated, not written as JSON."""
    for messages in ((USER, _CALLING, TOOL_RESULT), (USER, _CALLING)):
        text = renderer.try_render(messages)
        if text is not None:
            return "{'city'" not in text
    return False


def _takes_null(renderer: ChatRenderer, nulls: ChatRenderer) -> bool:
    calling = replace(_CALLING, content=None)
    text, null = renderer.try_render((USER, calling)), nulls.try_render((USER, calling))
    return null is not None and ("None" not in null or (text is not None and "None" in text))


def _closing(renderer: ChatRenderer, marks: ControlMarks) -> tuple[str, str]:
    text = renderer.try_render((USER, ANSWER), generation=False) or ""
    after = text.partition(REPLY)[2]
    spaces = after[: len(after) - len(after.lstrip())]
    token = marks.first(after[len(spaces) :])
    return (spaces + token, token) if token else ("", "")


def _opening(renderer: ChatRenderer) -> str:
    conversations = ((USER,), (replace(USER, content="other"),), (USER, _CALLING, TOOL_RESULT))
    prompts = [renderer.try_render(messages) for messages in conversations]
    return _common_suffix([text for text in prompts if text is not None])


def _calling_text(renderer: ChatRenderer, marks: ControlMarks) -> str:
    prompt = renderer.try_render((USER,))
    text = renderer.try_render((USER, _CALLING), generation=False)
    if prompt is None or text is None or not text.startswith(prompt):
        return ""
    before, name, _ = text[len(prompt) :].partition(_CALLING.tool_calls[0].name)
    for shown in ((), REPLY_MARKS):  # marks alone tell enough, but models vary the space at them
        calling = marks.without(before, but=shown).strip() if name else ""
        if len(calling) >= _LEAST_CALLING:
            return calling
    return ""


def _reads_thoughts(renderer: ChatRenderer) -> bool:
    """Whether thoughts in a reply's text are the same to it as in a field of their own.

    Tried where templates keep thoughts (in a reply that is followed by a tool's result) and where
    many drop them.
    """
    inside = Message("assistant", f"<think>\nTHOUGHT\n</think>\n\n{REPLY}")
    beside = Message("assistant", REPLY, reasoning="THOUGHT")
    calls = _CALLING.tool_calls
    for after, tool_calls in ((TOOL_RESULT, calls), (USER, ())):
        one, other = (
            renderer.try_render((USER, replace(message, tool_calls=tool_calls), after))
            for message in (inside, beside)
        )
        if one is None or other is None or one.split() != other.split():
            return False
    return True


def _common_suffix(texts: Sequence[str]) -> str:
    shortest = min(texts, key=len, default="")
    sizes = range(len(shortest), 0, -1)
    return next(
        (shortest[-n:] for n in sizes if all(text.endswith(shortest[-n:]) for text in texts)), ""
    )
