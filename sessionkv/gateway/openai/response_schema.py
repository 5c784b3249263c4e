"""Bodies of requests to the Responses API, and what of them is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints

from sessionkv.errors import InvalidRequest
from sessionkv.gateway.errors import refused
from sessionkv.gateway.grammars import ANY_JSON, Demand
from sessionkv.gateway.helpers import HEADER, METADATA
from sessionkv.gateway.keeping import DAY_S, IN_MEMORY_S
from sessionkv.gateway.openai.schema import Body, Sampling
from sessionkv.types.sampling import MAX_LOGPROBS

MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)]
Item = dict[str, Any]
MAX_ITEMS = 4096
MAX_COUNT = 2**31 - 1
HALF_HOUR_S = 1800.0
MAX_FORMAT_BYTES = 48 * 1024
"""Of a format that is kept with the response, beside everything else that is."""
_HAVE_NO_EFFECT = "Accepted; has no effect."
_REFUSED = ("prompt", "context_management", "moderation", "stop")
_LOGPROBS = "message.output_text.logprobs"

_REPEATED = (
    "tools",
    "tool_choice",
    "text",
    "reasoning",
    "metadata",
    "instructions",
    "user",
    "prompt_cache_key",
    "prompt_cache_options",
    "safety_identifier",
)


class ConversationRef(Body):
    """A conversation by its id."""

    id: str


class TextConfig(Body):
    """What the text of the answer is to be like."""

    format: dict[str, Any] | None = Field(
        None, description="`text`, `json_object` or `json_schema`."
    )
    verbosity: str | None = Field(None, description=_HAVE_NO_EFFECT)


class ReasoningConfig(Body):
    """How the model is to reason."""

    effort: str | None = Field(None, description=_HAVE_NO_EFFECT)
    summary: str | None = Field(None, description=_HAVE_NO_EFFECT)


class CacheOptions(Body):
    """How the prompt is cached, and with what it is compared."""

    mode: Literal["implicit", "explicit"] | None = Field(
        None, description="`explicit` is refused: every prompt is cached."
    )
    ttl: Literal["30m", "12h"] | None = Field(
        None, description="How long the cache is wanted: in memory, or on disk."
    )
    comparison_response_id: str | None = Field(
        None, description="Asks why the cache of that response was not found."
    )
    prewarm: bool | None = Field(None, description="`true` is refused.")


class ResponseRequest(Sampling):
    """Body of a request for a response."""

    input: str | Annotated[list[Item], Field(max_length=MAX_ITEMS)] | None = Field(
        None, description="Text of a user, or items."
    )
    instructions: str | None = Field(
        None, description="System prompt of this response; the next one does not inherit it."
    )
    previous_response_id: str | None = Field(
        None, description="Goes on from any stored response, as often as you like."
    )
    conversation: str | ConversationRef | None = Field(
        None, description="Goes on from a conversation, and adds input and output to it."
    )
    store: bool | None = Field(None, description="`false` keeps no response; default is to keep.")
    tools: Annotated[list[Item], Field(max_length=1024)] | None = Field(
        None, description="Functions; tools of other types are ignored."
    )
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = Field(
        None, description="Bounds calls of built-in tools, of which there are none."
    )
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    metadata: Metadata | None = None
    include: list[str] | None = Field(
        None,
        description="`reasoning.encrypted_content`, `message.output_text.logprobs`; others name "
        "what is never there.",
    )
    prompt_cache_options: CacheOptions | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="`auto` is refused: nothing is left out of a conversation."
    )
    background: bool | None = Field(
        None, description="Answers at once; the response is made whoever waits for it."
    )
    prompt: dict[str, Any] | None = Field(None, description="Refused.")
    context_management: list[dict[str, Any]] | None = Field(None, description="Refused.")
    moderation: dict[str, Any] | None = Field(None, description="Refused.")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="How many of the likeliest tokens to tell of at each place."
    )

    @property
    def is_stored(self) -> bool:
        """Whether the response is kept."""
        return self.store is not False

    @property
    def conversation_id(self) -> str | None:
        """The conversation's id, however it was named."""
        given = self.conversation
        return given.id if isinstance(given, ConversationRef) else given

    @property
    def seals_reasoning(self) -> bool:
        """Whether reasoning goes out in a form that the client carries."""
        return "reasoning.encrypted_content" in (self.include or ())

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens to tell of with each token of the text; None tells nothing."""
        is_asked = _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
        return (self.top_logprobs or 0) if is_asked else None

    @property
    def items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return list(self.input or ())

    @property
    def pin(self) -> tuple[str, float] | None:
        """Where the response's KV is wanted, and for how many seconds; None for no wish."""
        cache = self.prompt_cache_options
        if self.prompt_cache_retention == "24h":
            return "disk", DAY_S
        if cache is not None and cache.ttl is not None:
            return ("disk", DAY_S / 2) if cache.ttl == "12h" else ("host", HALF_HOUR_S)
        return None if self.prompt_cache_retention is None else ("host", IN_MEMORY_S)

    def for_helper(self) -> Self:
        """The same where the client said that nothing is to be kept of it.

        Raises:
            InvalidRequest: It asks for what is kept.
        """
        for name in ("background", "conversation"):
            if getattr(self, name):
                why = f"nothing is kept of a request with {HEADER} or {METADATA}; leave out either"
                raise refused(name, getattr(self, name), why)
        return self.model_copy(update={"store": False})

    def check(self) -> None:
        """See that everything that is asked for is done.

        Raises:
            InvalidRequest: Naming the first parameter that is not honoured.
        """
        for name in _REFUSED:
            if getattr(self, name):
                raise refused(name, getattr(self, name), "leave it out")
        if self.truncation == "auto":
            raise refused("truncation", "auto", "nothing is left out; use disabled")
        cache = self.prompt_cache_options
        if cache is not None and cache.mode == "explicit":
            raise refused("prompt_cache_options.mode", "explicit", "every prompt is cached")
        if cache is not None and cache.prewarm:
            raise refused("prompt_cache_options.prewarm", True, "leave it out")
        if self.n not in (None, 1):
            raise refused("n", self.n, "a response is one answer")
        if self.background and not self.is_stored:
            raise InvalidRequest("store", False, "true where a response is made in the background")
        if self.previous_response_id is not None and self.conversation is not None:
            raise InvalidRequest(
                "conversation",
                self.conversation_id,
                "absent beside previous_response_id",
                message="give conversation or previous_response_id, not both",
            )
        if self.conversation is not None and not self.is_stored:
            raise InvalidRequest("store", False, "true where a conversation is to be added to")
        self._check_plain()
        self._check_choice()
        self._check_format()

    @property
    def calls_nothing(self) -> bool:
        """Whether the model is not to call tools."""
        return self.tool_choice == "none"

    def _check_plain(self) -> None:
        """What is repeated in the answer has to be such that an answer can say it."""
        for name in _REPEATED:
            value = getattr(self, name)
            if isinstance(value, Body):
                value = value.model_dump()
            try:
                json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            except (ValueError, RecursionError):
                allowed = "finite numbers, and text without lone surrogates"
                raise InvalidRequest(name, "something else", allowed) from None

    def _check_choice(self) -> None:
        choice = self.tool_choice
        if choice in (None, "auto", "none"):
            return
        names = [tool.get("name") for tool in self.tools or () if tool.get("type") == "function"]
        if choice == "required" and names:
            return
        if isinstance(choice, dict) and choice.get("type") == "function":
            if choice.get("name") in names:
                return
            raise InvalidRequest("tool_choice.name", choice.get("name"), "the name of a function")
        raise refused("tool_choice", choice, "use auto, none, required or one of the functions")

    def demand(self, tools: Sequence[Mapping[str, Any]]) -> Demand:
        """What the answer is held to by a grammar.

        Args:
            tools: The functions, as templates take them.
        """
        several, choice = self.parallel_tool_calls is not False, self.tool_choice
        if isinstance(choice, dict):
            named = [tool for tool in tools if tool["function"]["name"] == choice["name"]]
            return Demand(tools=named[:1], several=False)
        if choice == "required":
            return Demand(tools=tools, several=several)
        wanted = None if self.text is None else self.text.format
        if wanted is None or wanted.get("type") in (None, "text"):
            return Demand()
        schema = wanted["schema"] if wanted["type"] == "json_schema" else ANY_JSON.schema
        return Demand(schema, [] if self.calls_nothing else tools, several)

    def _check_format(self) -> None:
        wanted = None if self.text is None else self.text.format
        kind = None if wanted is None else wanted.get("type")
        if kind not in (None, "text", "json_object", "json_schema"):
            raise InvalidRequest("text.format.type", kind, "text, json_object or json_schema")
        if wanted is not None and kind == "json_schema":
            if not isinstance(wanted.get("schema"), dict):
                raise InvalidRequest("text.format.schema", wanted.get("schema"), "a JSON schema")
            if not isinstance(wanted.get("name"), str):
                raise InvalidRequest("text.format.name", wanted.get("name"), "a name")
        size = len(json.dumps(wanted))
        if self.is_stored and size > MAX_FORMAT_BYTES:
            raise InvalidRequest(
                "text.format",
                f"{size} bytes long",
                f"at most {MAX_FORMAT_BYTES} bytes where the response is stored",
            )


class ConversationCreate(Body):
    """Body of a request for a new conversation."""

    items: Annotated[list[Item], Field(max_length=20)] | None = None
    metadata: Metadata | None = None


class ConversationUpdate(Body):
    """Body of a change to a conversation."""

    metadata: Metadata | None = None


class ItemsCreate(Body):
    """Items to be added to a conversation."""

    items: Annotated[list[Item], Field(min_length=1, max_length=20)]
