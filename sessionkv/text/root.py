"""What a session starts with, and what each turn appends to it, as raw text.

A turn's text is cut out of a short conversation - system, one user message, one reply, the new
messages - right behind the reply, so its cost does not depend on the history. Whether that is what
the template would have written is found out once, when the session is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sessionkv.errors import TemplateRefused
from sessionkv.text.conversation import ChatRenderer
from sessionkv.text.habits import ANSWER, REPLY, TOOL_RESULT, USER
from sessionkv.text.messages import Message

_STAND_IN_TOOLS = (
    '[{"type": "function", "function": {"name": "look", "description": "Look.",'
    ' "parameters": {"type": "object", "properties": {}}}}]'
)


@dataclass(frozen=True, slots=True)
class RootText:
    """System prompt and tools of a session, and how its template treats them.

    Made by :meth:`sessionkv.text.model.TextModel.root`; the same first three values give the same
    root, so those are what a journal has to keep.

    Attributes:
        system: System prompt, None where there is none.
        tools_json: Tools as JSON text in the client's order, None where there are none.
        now_s: Where the template's clock stands for this session, in wall-clock seconds.
        ids: Token ids of the root node; empty where the template writes nothing before the first
            message, which then carries it all.
        raw: Raw text of ``ids``.
        append_only: A turn only adds text. Otherwise the whole conversation must be rendered.
        reason: Why not, ``""`` where it is.
    """

    system: str | None
    tools_json: str | None
    now_s: float
    ids: tuple[int, ...] = ()
    raw: str = ""
    append_only: bool = False
    reason: str = "not probed"

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages a conversation of this session begins with."""
        return () if self.system is None else (Message("system", self.system),)


def root_text(renderer: ChatRenderer, root: RootText) -> str:
    """Raw text that system and tools alone give and every first turn then begins with; or none."""
    if not root.messages or renderer.habits.folds_system:
        return ""
    alone = renderer.try_render(root.messages, root.tools_json, now_s=root.now_s, generation=False)
    prompt = renderer.try_render((*root.messages, USER), root.tools_json, now_s=root.now_s)
    if not alone or prompt is None or not prompt.startswith(alone):
        return ""
    return alone if renderer.marks.parts(alone, prompt[len(alone) :]) else ""


def why_not_append_only(renderer: ChatRenderer, root: RootText) -> str:
    """``""`` where turns only add text, else what the template does instead."""
    prompt = renderer.try_render((*root.messages, USER), root.tools_json, now_s=root.now_s)
    if prompt is None:
        return "the template refuses a user message after this system prompt"
    for new in (USER, TOOL_RESULT):
        whole = renderer.try_render(
            (*root.messages, USER, ANSWER, new), root.tools_json, now_s=root.now_s
        )
        if whole is None and new is TOOL_RESULT:
            break  # tool results are refused whatever is before them
        if whole is None:
            return "the template refuses a second user message"
        before, found, after = whole.partition(REPLY)
        if not found or not _continues(prompt, before):
            return "the template rewrites what stands before a reply"
        if not after.startswith(renderer.habits.closing):
            return "the template closes a reply in more than one way"
        if after != behind_reply(renderer, root, (new,)):
            return "the template repeats the system prompt or tools in later turns"
    return ""


def _continues(prompt: str, before: str) -> bool:
    """Whether a reply to ``prompt`` stands where the template writes an earlier reply.

    It may open the reply to come further than earlier ones (``<think>``), and may put a space
    before earlier ones, which models sample themselves.
    """
    return prompt.startswith(before) or (before.startswith(prompt) and before.rstrip() == prompt)


def behind_reply(renderer: ChatRenderer, root: RootText, new: Sequence[Message]) -> str:
    """Raw text from the end of a reply to the next generation prompt. O(new text).

    Raises:
        TemplateRefused: With the template's own words.
    """
    system = None if root.system is None else Message("system", "Help.")
    base = (USER, ANSWER) if system is None else (system, USER, ANSWER)
    tools_json = None if root.tools_json is None else _STAND_IN_TOOLS
    whole = renderer.render((*base, *new), tools_json, now_s=root.now_s)
    _, found, after = whole.partition(REPLY)
    if not found:
        raise TemplateRefused("the chat template leaves out the reply before these messages")
    return after


def first_turn(renderer: ChatRenderer, root: RootText, new: Sequence[Message]) -> str:
    """Raw text of the first turn behind the root's, up to the generation prompt.

    Raises:
        TemplateRefused: With the template's own words.
    """
    whole = renderer.render((*root.messages, *new), root.tools_json, now_s=root.now_s)
    if not whole.startswith(root.raw):
        raise TemplateRefused("the chat template rewrites the system prompt for these messages")
    return whole[len(root.raw) :]
