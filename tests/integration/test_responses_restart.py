"""Responses of a real engine that is killed: they are there afterwards, and so is their cache."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from sessionkv import Client
from tests.integration.test_cli import Place, place  # noqa: F401 - a fixture

ON_DISK = ("--http", "127.0.0.1:0", "--disk-bytes", "64MiB")
BRIEF: dict[str, Any] = {"instructions": "Be brief."}
ASK: dict[str, Any] = {"model": "checksum", "max_output_tokens": 8, "temperature": 0}
ENDLESS: dict[str, Any] = ASK | {"max_output_tokens": 3000, "extra_body": {"ignore_eos": True}}


def _client(printed: list[str]) -> openai.OpenAI:
    (url,) = (line.split()[1] for line in printed if line.startswith("http "))
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@dataclass(frozen=True)
class Answered:
    """Responses that were acknowledged: whole, a stream, in a conversation, in the background."""

    first: Any
    last: Any
    in_conversation: Any
    in_background: Any
    listed: dict[str, Any]

    @classmethod
    def by(cls, client: openai.OpenAI) -> Answered:
        first = client.responses.create(input="one " * 50, **BRIEF, **ASK)
        events: Any = client.responses.create(
            input="two", previous_response_id=first.id, stream=True, **BRIEF, **ASK
        )
        last = [event for event in events][-1].response
        conversation = client.conversations.create(metadata={"a": "b"}).id
        third = client.responses.create(input="three", conversation=conversation, **ASK)
        fourth = client.responses.create(input="four", background=True, **ASK)
        while fourth.status in ("queued", "in_progress"):
            fourth = client.responses.retrieve(fourth.id)
        listed = client.conversations.items.list(conversation).to_dict()
        return cls(first, last, third, fourth, listed)

    @property
    def all(self) -> tuple[Any, ...]:
        return self.first, self.last, self.in_conversation, self.in_background


def test_kill_9_between_the_events_of_a_response_loses_no_other(place: Place) -> None:  # noqa: F811
    with place.serving(*ON_DISK) as (process, printed), _client(printed) as client:
        answered = Answered.by(client)
        with Client(place.endpoint) as engine:
            engine.flush()
        behind = {"previous_response_id": answered.last.id}
        left = client.responses.create(input="five", background=True, **behind, **ENDLESS)
        with client.responses.create(input="six", stream=True, **behind, **ENDLESS) as events:
            begun = next(e for e in events if e.type == "response.created").response.id
            next(e for e in events if e.type == "response.output_text.delta")
            assert client.responses.retrieve(left.id).status == "in_progress"
            process.send_signal(signal.SIGKILL)
            process.wait(30)
    with place.serving(*ON_DISK) as (_, printed), _client(printed) as client:
        _goes_on(client, answered)
        # What was not there yet is not there in part, nor for ever on its way.
        failed = client.responses.retrieve(left.id)
        assert (failed.status, failed.background) == ("failed", True)
        assert failed.error is not None
        assert failed.error.code == "server_error"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(begun)
        with Client(place.endpoint) as engine:
            assert [info for info in engine.sessions("~http:") if info.running] == []


def _goes_on(client: openai.OpenAI, answered: Answered) -> None:
    again = client.responses.create(
        input="three", previous_response_id=answered.last.id, **BRIEF, **ASK
    )
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens >= 200
    report: Any = again.to_dict()["sessionkv"]
    assert report["cache"]["disk_tokens"] > 0
    branch = client.responses.create(
        input="two", previous_response_id=answered.first.id, **BRIEF, **ASK
    )
    assert branch.output_text == answered.last.output_text
    for before in answered.all:
        stored = client.responses.retrieve(before.id)
        assert (stored.output, stored.usage) == (before.output, before.usage)
        further: Any = client.responses.create(
            input="x", previous_response_id=before.id, instructions=before.instructions, **ASK
        )
        assert further.usage.input_tokens > before.usage.total_tokens
    conversation = answered.in_conversation.conversation.id
    assert client.conversations.items.list(conversation).to_dict() == answered.listed
    said: Any = client.responses.create(input="seven", conversation=conversation, **ASK)
    assert said.usage.input_tokens > answered.in_conversation.usage.total_tokens
