"""How a model writes what is not plain text in its replies: tool calls and reasoning.

Found out from the chat template where the model's text is known, told to clients with the
``welcome``, and followed by whoever takes replies apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

CALL_STYLES = ("hermes", "llama3", "mistral", "qwen3_coder")
"""Hermes and Qwen: ``<tool_call>{json}</tool_call>``; Llama 3: ``<|python_tag|>`` or nothing before
a JSON object; Mistral: ``[TOOL_CALLS][{json}]`` or ``[TOOL_CALLS]name[ARGS]{json}``; Qwen3-Coder:
``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``."""


@dataclass(frozen=True, slots=True)
class ReplyStyle:
    """Of one model.

    Attributes:
        tool_calls: One of :data:`CALL_STYLES`; None where the template writes no tool calls, or
            writes them in a way that is not known here.
        reasoning: What opens and closes reasoning at the start of a reply; None for none.
        starts_in_reasoning: The prompt ends with the opening, so the reply does not show it.
        single_call: The template takes no message with more than one call.
    """

    tool_calls: str | None = None
    reasoning: tuple[str, str] | None = None
    starts_in_reasoning: bool = False
    single_call: bool = False

    def without_calls(self) -> ReplyStyle:
        """The same for a request without tools, whose reply is text whatever it looks like."""
        return replace(self, tool_calls=None)

    def to_map(self) -> dict[str, Any]:
        """Plain map for the wire."""
        return {
            "tool_calls": self.tool_calls,
            "reasoning": None if self.reasoning is None else list(self.reasoning),
            "starts_in_reasoning": self.starts_in_reasoning,
            "single_call": self.single_call,
        }

    @classmethod
    def from_map(cls, value: Mapping[str, Any]) -> ReplyStyle:
        """From the wire; what is absent or not known here is left out."""
        calls, marks = value.get("tool_calls"), value.get("reasoning")
        reasoning = (str(marks[0]), str(marks[1])) if marks and len(marks) == 2 else None
        return cls(
            tool_calls=calls if calls in CALL_STYLES else None,
            reasoning=reasoning,
            starts_in_reasoning=reasoning is not None and bool(value.get("starts_in_reasoning")),
            single_call=bool(value.get("single_call")),
        )
