"""The body of a Chat Completions request, and what of it is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from sessionkv.errors import InvalidRequest
from sessionkv.gateway.errors import refused
from sessionkv.gateway.grammars import ANY_JSON, Demand
from sessionkv.gateway.openai.schema import Body, ChatMessage, Sampling, Text, Tool
from sessionkv.gateway.transcript import Transcript


class NamedFunction(Body):
    """A function by its name."""

    name: str


class NamedTool(Body):
    """A tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    """What the answer must look like."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(Sampling):
    """Body of a request."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(
        None, description="Most tokens, reasoning included; what fits the window by default."
    )
    max_tokens: int | None = Field(
        None, description="The same under its old name; `max_completion_tokens` wins."
    )
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(
        None,
        description="`false` ends an answer with its first call. What the model said behind it "
        "before it was stopped is not told, but billed if it ended by itself.",
    )
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    store: bool | None = Field(None, description="Accepted; has no effect.")
    reasoning_effort: Text | None = Field(None, description="Accepted; has no effect.")
    verbosity: Literal["medium"] | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: dict[str, Any] | None = Field(None, description="Accepted; has no effect.")
    functions: Any = Field(None, description="Refused: use `tools`.")
    function_call: Any = Field(None, description="Refused: use `tool_choice`.")
    audio: Any = Field(None, description="Refused.")
    web_search_options: Any = Field(None, description="Refused.")

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of an answer; None is what fits."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens are told of beside each; None where nothing is."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def transcript(self) -> Transcript:
        """The conversation for the engine."""
        tools = None if self.tools is None else [tool.to_map() for tool in self.tools]
        return Transcript([message.to_map() for message in self.messages], tools)

    def check(self) -> None:
        """Refuse what is not honoured.

        Raises:
            InvalidRequest: Naming the parameter.
        """
        for name, instead in _REFUSED.items():
            if (value := getattr(self, name)) is not None:
                raise refused(name, value, instead)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs", self.top_logprobs, "only with logprobs: true")
        names = [tool.function.name for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise InvalidRequest("tool_choice", self.tool_choice.function.name, "a tool's name")
        if self.tool_choice == "required" and not names:
            raise InvalidRequest("tool_choice", "required", "none or auto, without tools")
        if self.response_format is not None and self.response_format.type == "json_schema":
            given = self.response_format.json_schema
            if given is None or given.schema_ is None:
                raise InvalidRequest("response_format.json_schema.schema", None, "a JSON schema")

    def demand(self) -> Demand:
        """What an answer is held to by a grammar."""
        choice, tools = self.tool_choice, [tool.to_map() for tool in self.tools or ()]
        several = self.parallel_tool_calls is not False
        if isinstance(choice, NamedTool):
            named = [tool for tool in tools if tool["function"]["name"] == choice.function.name]
            return Demand(tools=named[:1], several=False)
        if choice == "required":
            return Demand(tools=tools, several=several)
        form = self.response_format
        if form is None or form.type == "text":
            return Demand()
        schema = form.json_schema.schema_ if form.json_schema is not None else None
        callable_tools = [] if choice == "none" else tools
        return Demand(schema or ANY_JSON.schema, callable_tools, several)


_REFUSED = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "answers are text",
    "web_search_options": "there is no search",
}
