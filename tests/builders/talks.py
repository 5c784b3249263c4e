"""Conversations over Chat Completions as a client holds them, and what their prompts must be.

The ids of a prompt are worked out here once more, from the template's own text, so that a test can
say to the token where two prompts part.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass, field
from typing import Any

import jinja2

from tests.builders.gateway import MODEL, TOOLS, HttpEngine

CHAT = "/v1/chat/completions"
_TOKEN = re.compile(r"<\|[a-z_]+\|>|.", re.DOTALL)
_SHOWN_TOKENS = 16


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def tool(name: str, about: str) -> dict[str, Any]:
    function = {"name": name, "description": about, "parameters": {"type": "object"}}
    return {"type": "function", "function": function}


def prompt_of(body: dict[str, Any]) -> list[str]:
    """The pieces of a request's prompt, one a token: control tokens, and ASCII characters."""
    messages = copy.deepcopy(body["messages"])
    while [message["role"] for message in messages[:2]] == ["system", "system"]:  # they are one
        messages[1]["content"] = f"{messages[0]['content']}\n\n{messages[1]['content']}"
        del messages[0]
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    environment = jinja2.Environment(autoescape=False)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    text = environment.from_string(TOOLS).render(
        messages=messages, tools=body.get("tools"), add_generation_prompt=True
    )
    return _TOKEN.findall(text)


@dataclass(frozen=True)
class Parting:
    """Where a prompt leaves a log: the position, and both from there on; None where it does not."""

    token: int | None
    expected: str | None = None
    found: str | None = None


@dataclass
class Talk:
    """One conversation: what the client has of it, and the log that it left.

    Attributes:
        body: What the next request sends; tests change it.
        log: Pieces of all tokens so far.
        last: The latest answer.
    """

    served: HttpEngine
    body: dict[str, Any]
    log: list[str] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)

    def ask(self, raw: str, *more: dict[str, Any]) -> dict[str, Any]:
        """Send it with these messages behind; the answer, which says ``raw``, is taken in."""
        self.body["messages"] += more
        pieces = prompt_of(self.body)
        answer = self.send(self.body)
        assert answer["usage"]["prompt_tokens"] == len(pieces)
        self.log = [*pieces, *_TOKEN.findall(raw), "<|im_end|>"]
        self.body["messages"].append(answer["choices"][0]["message"])
        return answer

    def send(self, body: dict[str, Any]) -> dict[str, Any]:
        """An answer that has nothing to do with the conversation, for all that is known here."""
        response = self.served.post(CHAT, {"model": MODEL, "temperature": 0} | body)
        assert response.status_code == 200, response.text
        self.last = response.json()
        report = self.last["sessionkv"]["cache"]
        assert report["cached_tokens"] + report["computed_tokens"] == report["prompt_tokens"]
        assert report["prompt_tokens"] == self.last["usage"]["prompt_tokens"]
        details = self.last["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == report["cached_tokens"]
        return self.last

    def result_of_call(self, text: str) -> dict[str, Any]:
        """What a tool said to the latest call."""
        (call,) = self.last["choices"][0]["message"]["tool_calls"]
        return {"role": "tool", "tool_call_id": call["id"], "content": text}

    def parting(self) -> Parting:
        """Where the prompt of :attr:`body` leaves the log."""
        pieces = prompt_of(self.body)
        shared = min(len(pieces), len(self.log))
        at = next((i for i in range(shared) if pieces[i] != self.log[i]), shared)
        if at == len(self.log):
            return Parting(None)
        shown = slice(at, at + _SHOWN_TOKENS)
        return Parting(at, "".join(self.log[shown]), "".join(pieces[shown]))
