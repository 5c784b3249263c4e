"""Bodies of Anthropic's Messages API, as they are read and documented.

Everywhere ``null`` is the same as absent, and a field that nobody knows is ignored. Values of the
wrong type are refused, never converted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Body(BaseModel):
    """Base of all request bodies and their parts."""

    model_config = ConfigDict(strict=True, extra="ignore")


class CacheControl(Body):
    """A breakpoint: the conversation's cache is wanted for so long."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(BaseModel):
    """A piece of a message's content; what its type needs is checked when it is converted."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: str
    cache_control: CacheControl | None = None
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None


class SystemBlock(Body):
    """A piece of the system prompt."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class MessageParam(Body):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Body):
    """A tool that the client runs; tools that the server would run are refused by their type."""

    type: str | None = None
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = Field(
        None, description="`true`: in the prompt only where a result refers to it."
    )
    cache_control: CacheControl | None = None


class ToolChoice(Body):
    """Whether and which tool is to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = Field(
        None,
        description="`true`: the first call ends the answer. What the model said behind it before "
        "it was stopped is not told, but billed if it ended by itself.",
    )


class Thinking(Body):
    """Whether the answer tells the model's reasoning."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1024)] | None = Field(
        None, description="Accepted; how long the model thinks is its own choice."
    )
    display: str | None = Field(
        None, description="`omitted` leaves the text of thinking blocks empty."
    )


class Metadata(BaseModel):
    """About the request."""

    model_config = ConfigDict(strict=True, extra="allow")
    user_id: str | None = Field(None, description="A `session_UUID` in it names the conversation.")


class OutputConfig(Body):
    """About the answer."""

    effort: str | None = Field(None, description="Accepted; has no effect.")
    format: dict[str, Any] | None = None


class Diagnostics(Body):
    """Asks why less of the cache was reused than by the answer of this id."""

    previous_message_id: str | None = None


class CountTokensRequest(Body):
    """What makes up a prompt; body of a request to count its tokens."""

    model: str = Field(description="Name of the served model.")
    messages: Annotated[list[MessageParam], Field(min_length=1)]
    system: str | list[SystemBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: CacheControl | None = Field(
        None, description="A breakpoint at the request's end."
    )
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Of the request that is counted; absent is many."
    )
    container: Any = Field(None, description="Refused.")
    mcp_servers: Any = Field(None, description="Refused.")


class MessagesRequest(CountTokensRequest):
    """Body of a request for an answer."""

    max_tokens: Annotated[int, Field(ge=1)] = Field(
        description="Most tokens; more than the window has left ends at its end."
    )
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stop_sequences: list[str] | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(
        None, description="Accepted: there is one tier."
    )
    speed: Literal["standard"] | None = None
    inference_geo: Any = Field(None, description="Refused.")
    diagnostics: Diagnostics | None = None
