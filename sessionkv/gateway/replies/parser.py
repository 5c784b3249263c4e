"""Takes a model's reply apart while it comes: text, reasoning, tool calls.

Sans-IO. Whatever the pieces that a reply comes in, the events are the same once joined
(:func:`~sessionkv.gateway.replies.events.joined`). Text is held back only while it may be the
beginning of a mark, or space beside one. Nothing is lost and nothing raises: what turns out to be
no call is text, and of a call that goes wrong after it has begun the rest is text.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sessionkv.gateway.replies.calls import CallFinder
from sessionkv.gateway.replies.events import Reasoning, ReplyEvent, joined
from sessionkv.gateway.replies.thoughts import Thoughts
from sessionkv.types.reply_style import ReplyStyle

_ID_CHARS = string.ascii_letters + string.digits


def new_call_id() -> str:
    """Nine letters and digits: templates of Mistral models take no other id, others take any."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))


class ReplyParser:
    """One reply. One thread."""

    def __init__(
        self,
        style: ReplyStyle,
        *,
        new_id: Callable[[], str] = new_call_id,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Start before the reply.

        Args:
            style: Of the model; :meth:`~sessionkv.types.reply_style.ReplyStyle.without_calls` for a
                request without tools.
            new_id: Makes an id for each call.
            tools: As the template is given them: where a form of call does not say what type a
                value has, their schemas do.
        """
        functions = [tool["function"] for tool in tools]
        self._calls = CallFinder(
            style.tool_calls,
            new_id,
            only_one=style.single_call,
            schemas={item["name"]: item.get("parameters") or {} for item in functions},
        )
        self._thoughts: Thoughts | None = None
        self._has_rest = False
        self._num_fed = self._rest_at = (
            0  # characters of the reply; where what is no reasoning begins
        )
        if style.reasoning is not None:
            self._thoughts = Thoughts(style.reasoning, starts_inside=style.starts_in_reasoning)

    @property
    def complete_calls(self) -> int:
        """Calls that are complete."""
        return self._calls.complete

    @property
    def is_inside_call(self) -> bool:
        """A call has begun that is not complete; for good where it went wrong."""
        return self._calls.begun > self._calls.complete

    @property
    def first_call_end(self) -> int | None:
        """After how many characters of the reply its first call ends, with all that belongs to it.

        None until that is certain: what closes a call comes behind its arguments.
        """
        end = self._calls.first_end
        return None if end is None else self._rest_at + end

    def feed(self, text: str) -> list[ReplyEvent]:
        """Take the next piece of the reply; what became certain with it, in order."""
        self._num_fed += len(text)
        thought, rest = ("", text) if self._thoughts is None else self._thoughts.feed(text)
        return joined(self._events(thought, rest))

    def end(self) -> list[ReplyEvent]:
        """The reply is over: what was held back."""
        thought, rest = ("", "") if self._thoughts is None else self._thoughts.end()
        return joined(self._events(thought, rest) + self._calls.end())

    def _events(self, thought: str, rest: str) -> list[ReplyEvent]:
        events: list[ReplyEvent] = [Reasoning(thought)] if thought else []
        if rest:
            thinks = self._thoughts is not None and self._thoughts.found
            if thinks and not self._has_rest:
                self._calls.is_beside = True
            if not self._has_rest:
                self._rest_at = self._num_fed - len(rest)
            self._has_rest = True
            events += self._calls.feed(rest)
        return events
