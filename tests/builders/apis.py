"""The gateway's APIs behind one face: the same question to each, and what each says in one shape.

Questions are written as messages of Chat Completions; an :class:`Api` writes them as its own. What
a stream says is put together from its deltas alone, so that one that is lost or doubled shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sessionkv.text.builtin import IM_END, IM_START
from tests.builders.gateway import HEAD, MODEL, Gateway

Message = dict[str, Any]


@dataclass
class Said:
    """An answer.

    Attributes:
        text: Without reasoning and calls.
        reason: As Chat Completions names it: ``stop``, ``length``, ``tool_calls``.
        calls: Name and JSON text of the arguments of each.
        usage: Tokens of the prompt, of them cached, and of the answer.
        thoughts: The reasoning.
    """

    text: str = ""
    reason: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    usage: tuple[int, int, int] = (0, 0, 0)
    thoughts: str = ""


class Api:
    """One of them.

    Attributes:
        name: Of the case in a test's name.
        path: Of its requests.
        limit: Its parameter for the most tokens.
        stop: Its parameter for stop strings.
    """

    name: str
    path: str
    limit = "max_tokens"
    stop = "stop"

    def __repr__(self) -> str:
        return self.name

    def body(self, *messages: Message | str, **fields: Any) -> dict[str, Any]:
        """A request of the API; a text is a user's. ``limit``, ``stop`` and ``tools`` (functions
        as Chat Completions has them) are written as the API names them, the rest as it is."""
        said = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
        own = {"limit": self.limit, "stop": self.stop}
        named: dict[str, Any] = {own.get(name) or name: v for name, v in fields.items()}
        if "tools" in named:
            named["tools"] = [self.tool(tool["function"]) for tool in named["tools"]]
        return {"model": MODEL} | self.asked(said) | named

    def asked(self, messages: list[Message]) -> dict[str, Any]:
        """The messages as the API takes them."""
        raise NotImplementedError

    def tool(self, function: dict[str, Any]) -> dict[str, Any]:
        """A function as the API takes it."""
        raise NotImplementedError

    def read(self, answer: dict[str, Any]) -> Said:
        """A whole answer."""
        raise NotImplementedError

    def gather(self, events: list[Any]) -> Said:
        """A stream that came to its end."""
        raise NotImplementedError

    def say(self, served: Gateway, body: dict[str, Any], *, stream: bool) -> Said:
        """Ask, whole or as a stream."""
        if stream:
            return self.gather(served.stream(self.path, body | self.streaming))
        answer = served.post(self.path, body)
        assert answer.status_code == 200, answer.text
        return self.read(answer.json())

    @property
    def streaming(self) -> dict[str, Any]:
        """What asks for a stream with usage."""
        return {"stream": True}


class _OpenAI(Api):
    @property
    def streaming(self) -> dict[str, Any]:
        return {"stream": True, "stream_options": {"include_usage": True}}

    def gather(self, events: list[Any]) -> Said:
        *chunks, last, done = events
        assert (last["choices"], done) == ([], "[DONE]")
        said = Said(usage=_openai_usage(last["usage"]))
        calls: dict[int, list[str]] = {}
        for chunk in chunks:
            assert not said.reason, "something came behind the end"
            (choice,) = chunk["choices"]
            delta = choice.get("delta", {"content": choice.get("text")})
            said.text += delta.get("content") or ""
            said.thoughts += delta.get("reasoning_content") or ""
            for part in delta.get("tool_calls", ()):
                call = calls.setdefault(part["index"], ["", ""])
                call[0] += part["function"].get("name", "")
                call[1] += part["function"].get("arguments", "")
            said.reason = choice["finish_reason"] or ""
        assert list(calls) == [*range(len(calls))]
        said.calls = [(name, arguments) for name, arguments in calls.values()]
        return said


class Chat(_OpenAI):
    """Chat Completions."""

    name, path = "chat", "/v1/chat/completions"

    def asked(self, messages: list[Message]) -> dict[str, Any]:
        return {"messages": messages}

    def tool(self, function: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", "function": function}

    def read(self, answer: dict[str, Any]) -> Said:
        (choice,) = answer["choices"]
        message = choice["message"]
        functions = [call["function"] for call in message.get("tool_calls", ())]
        return Said(
            message.get("content") or "",
            choice["finish_reason"],
            [(function["name"], function["arguments"]) for function in functions],
            _openai_usage(answer["usage"]),
            message.get("reasoning_content") or "",
        )


class Completions(_OpenAI):
    """Completions: the last message's text is the prompt, as it is."""

    name, path = "completions", "/v1/completions"

    def asked(self, messages: list[Message]) -> dict[str, Any]:
        return {"prompt": messages[-1]["content"]}

    def read(self, answer: dict[str, Any]) -> Said:
        (choice,) = answer["choices"]
        usage = _openai_usage(answer["usage"])
        return Said(choice["text"], choice["finish_reason"], usage=usage)


class Responses(Api):
    """Responses."""

    name, path, limit = "responses", "/v1/responses", "max_output_tokens"

    def asked(self, messages: list[Message]) -> dict[str, Any]:
        return {"input": [item for message in messages for item in _items(message)]}

    def tool(self, function: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function"} | function

    def read(self, answer: dict[str, Any]) -> Said:
        said = Said(usage=_responses_usage(answer["usage"]))
        for item in answer["output"]:
            if item["type"] == "function_call":
                said.calls.append((item["name"], item["arguments"]))
            elif item["type"] == "message":
                said.text += "".join(part["text"] for part in item["content"])
            else:
                said.thoughts += "".join(part["text"] for part in item["content"])
        said.reason = _responses_reason(answer, bool(said.calls))
        return said

    def gather(self, events: list[Any]) -> Said:
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        *events, last = events
        said = Said(usage=_responses_usage(last["response"]["usage"]))
        calls: dict[int, list[str]] = {}
        for event in events:
            kind = event["type"]
            if kind == "response.output_text.delta":
                said.text += event["delta"]
            elif kind == "response.reasoning_text.delta":
                said.thoughts += event["delta"]
            elif kind == "response.function_call_arguments.delta":
                calls[event["output_index"]][1] += event["delta"]
            elif kind == "response.output_item.added" and event["item"]["type"] == "function_call":
                calls[event["output_index"]] = [event["item"]["name"], ""]
        said.calls = [(name, arguments) for name, arguments in calls.values()]
        said.reason = _responses_reason(last["response"], bool(calls))
        assert self.read(last["response"]) == said
        return said


class Messages(Api):
    """Anthropic's Messages. ``max_tokens`` has to be there: 200 unless given."""

    name, path, stop = "messages", "/v1/messages", "stop_sequences"

    def body(self, *messages: Message | str, **fields: Any) -> dict[str, Any]:
        return {"max_tokens": 200} | super().body(*messages, **fields)

    def asked(self, messages: list[Message]) -> dict[str, Any]:
        system = [m["content"] for m in messages if m["role"] in ("system", "developer")]
        rest = [m for m in messages if m["role"] not in ("system", "developer")]
        found: dict[str, Any] = {"messages": [_turn(message) for message in rest]}
        return found | ({"system": "\n\n".join(system)} if system else {})

    def tool(self, function: dict[str, Any]) -> dict[str, Any]:
        rest = {name: value for name, value in function.items() if name != "parameters"}
        return rest | {"input_schema": function.get("parameters", {"type": "object"})}

    def read(self, answer: dict[str, Any]) -> Said:
        said = Said(reason=_REASONS[answer["stop_reason"]], usage=_messages_usage(answer["usage"]))
        for block in answer["content"]:
            if block["type"] == "tool_use":
                said.calls.append((block["name"], json.dumps(block["input"])))
            else:
                said.text += block.get("text", "")
                said.thoughts += block.get("thinking", "")
        return said

    def gather(self, events: list[Any]) -> Said:
        start, *events, last, stop = [event for event in events if event["type"] != "ping"]
        assert start["type"] == "message_start"
        assert (last["type"], stop["type"]) == ("message_delta", "message_stop")
        usage = start["message"]["usage"] | last["usage"]
        said = Said(reason=_REASONS[last["delta"]["stop_reason"]], usage=_messages_usage(usage))
        calls: dict[int, list[str]] = {}
        for event in events:
            block, delta = event.get("content_block", {}), event.get("delta", {})
            if block.get("type") == "tool_use":
                calls[event["index"]] = [block["name"], ""]
            if "partial_json" in delta:
                calls[event["index"]][1] += delta["partial_json"]
            said.text += delta.get("text", "")
            said.thoughts += delta.get("thinking", "")
        said.calls = [(name, arguments) for name, arguments in calls.values()]
        return said


CHAT, COMPLETIONS, RESPONSES, MESSAGES = Chat(), Completions(), Responses(), Messages()
CHATS: tuple[Api, ...] = (CHAT, RESPONSES, MESSAGES)
ALL: tuple[Api, ...] = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)

_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
}


def says(replies: Mapping[str, str | bytes | Sequence[int]]) -> Callable[[Sequence[int]], int]:
    """A runner's script, of tokens that are bytes: what is said to a prompt that ends with a key.

    Behind the key may stand what a template of ChatML writes. A reply ends with IM_END, unless its
    ids end otherwise; a prompt without a key is answered with the end alone.
    """
    ended = {
        key.encode(): [*(reply.encode() if isinstance(reply, str) else reply), IM_END]
        for key, reply in replies.items()
    }
    tail = [IM_END, 10, IM_START, *HEAD, 10]

    def script(ids: Sequence[int]) -> int:
        shown = bytes(i if i < 256 else 0 for i in ids)
        found = [(shown.rfind(key) + len(key), key) for key in ended if key in shown]
        if not found:
            return IM_END
        at, key = max(found)
        rest = list(ids[at:])
        said = len(rest) - len(tail) if rest[: len(tail)] == tail else len(rest)
        return ended[key][said] if said < len(ended[key]) else IM_END

    return script


def _items(message: Message) -> list[dict[str, Any]]:
    """A message as items of Responses."""
    if message["role"] == "tool":
        output = {"call_id": message["tool_call_id"], "output": message["content"]}
        return [{"type": "function_call_output"} | output]
    calls = [
        {"type": "function_call", "call_id": call["id"]} | call["function"]
        for call in message.get("tool_calls", ())
    ]
    if message.get("content") is None:
        return calls
    content = message["content"]
    if isinstance(content, list):
        kind = "output_text" if message["role"] == "assistant" else "input_text"
        content = [part | {"type": kind} if part["type"] == "text" else part for part in content]
    return [{"role": message["role"], "content": content}, *calls]


def _turn(message: Message) -> dict[str, Any]:
    """A message as Anthropic has it."""
    if message["role"] == "tool":
        result = {"tool_use_id": message["tool_call_id"], "content": message["content"]}
        return {"role": "user", "content": [{"type": "tool_result"} | result]}
    calls = message.get("tool_calls", ())
    if not calls:
        return {"role": message["role"], "content": message["content"]}
    text = [{"type": "text", "text": message["content"]}] if message.get("content") else []
    uses = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": json.loads(call["function"]["arguments"]),
        }
        for call in calls
    ]
    return {"role": "assistant", "content": [*text, *uses]}


def _openai_usage(usage: dict[str, Any]) -> tuple[int, int, int]:
    prompt, said = usage["prompt_tokens"], usage["completion_tokens"]
    assert usage["total_tokens"] == prompt + said
    return prompt, usage["prompt_tokens_details"]["cached_tokens"], said


def _responses_usage(usage: dict[str, Any]) -> tuple[int, int, int]:
    prompt, said = usage["input_tokens"], usage["output_tokens"]
    assert usage["total_tokens"] == prompt + said
    details = usage["input_tokens_details"]
    assert details["cached_tokens"] + details["cache_write_tokens"] == prompt
    return prompt, details["cached_tokens"], said


def _messages_usage(usage: dict[str, Any]) -> tuple[int, int, int]:
    cached = usage["cache_read_input_tokens"]
    computed = usage["input_tokens"] + usage["cache_creation_input_tokens"]
    return computed + cached, cached, usage["output_tokens"]


def _responses_reason(answer: dict[str, Any], calls: bool) -> str:
    if answer["status"] == "incomplete":
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        return "length"
    assert answer["status"] == "completed"
    return "tool_calls" if calls else "stop"
