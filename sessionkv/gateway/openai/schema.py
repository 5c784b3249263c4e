"""What requests of Chat Completions and Completions share, as they are read and documented.

Everywhere ``null`` is the same as absent, and a field that nobody knows is ignored. Values of the
wrong type are refused, never converted. Ranges that the engine checks are not repeated here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from sessionkv.types.sampling import MAX_STOP_STRINGS

MAX_CHOICES = 16
ServiceTier = Literal["auto", "default", "flex", "priority"]
Retention = Literal["in_memory", "in-memory", "24h"]


def _whole_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("half_character", "half a character is no text") from None
    return text


Text = Annotated[str, AfterValidator(_whole_characters)]
"""Text that can be written down; what goes to the engine as it is, is checked there."""


class Body(BaseModel):
    """Base of all request bodies and their parts."""

    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(Body):
    """How a stream is told."""

    include_usage: bool | None = Field(
        None, description="A last chunk with the usage and no choices."
    )
    include_obfuscation: bool | None = Field(None, description="Accepted; nothing is obfuscated.")


class Sampling(Body):
    """Parameters that say how tokens are chosen and when to stop."""

    model: Text = Field(description="Name of the served model.")
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(
        None, description="How many answers, computed side by side over one prompt."
    )
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, description="Keep the k likeliest tokens; 0 is off.")
    min_p: float | None = Field(None, description="Least share of the likeliest one's chance.")
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = Field(
        None, description="Same seed and request, same answer; the i-th of n uses seed + i."
    )
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    user: Text | None = Field(None, description="Accepted; has no effect.")
    metadata: dict[str, Any] | None = Field(
        None, description='`sessionkv_helper`: "true" marks a request that nothing is kept of.'
    )
    session_id: Text | None = Field(None, description="Names the conversation.")
    prompt_cache_key: Text | None = Field(None, description="Names the conversation.")
    prompt_cache_retention: Retention | None = Field(
        None, description="`24h` keeps the conversation's cache on disk for a day."
    )
    service_tier: ServiceTier | None = Field(
        None, description="`priority` goes before others, `flex` behind them."
    )
    safety_identifier: Text | None = Field(None, description="Accepted; has no effect.")


class Part(BaseModel):
    """A piece of a message's content; text alone is supported."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: str
    text: str | None = None


class CalledFunction(Body):
    """Which function was called with what."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body):
    """A call that an earlier answer asked for."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(Body):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = Field(None, description="Reasoning of an earlier answer.")
    reasoning: str | None = Field(None, description="The same, as some clients name it.")

    def to_map(self) -> dict[str, Any]:
        """As the engine takes it; absent fields left out."""
        value = self.model_dump(exclude_none=True, exclude={"reasoning"})
        value.setdefault("content", None)
        if self.reasoning is not None:
            value.setdefault("reasoning_content", self.reasoning)
        return value


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function

    def to_map(self) -> dict[str, Any]:
        """As the template is given it: what the client sent, absent fields left out."""
        return self.model_dump(exclude_none=True)
