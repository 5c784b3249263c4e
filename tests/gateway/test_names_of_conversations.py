"""Agents name their conversations, each in its way: what changed at the start of one is told.

Found is a conversation by its content alone. Where its very first message is another one, only the
name says that it is the same; the report then says what was edited, instead of calling it new.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from sessionkv.gateway.keeping import HEADERS
from tests.builders.apis import CHAT, MESSAGES, Api
from tests.builders.gateway import HttpEngine, http_engine

ID = "12345678-1234-1234-1234-1234567890ab"
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def served() -> Iterator[HttpEngine]:
    with http_engine(runner={"script": lambda ids: 97}) as engine:
        yield engine


def spelled(name: str) -> list[str]:
    return [name, name.upper(), name.replace("-", "_"), name.title().replace("-", "_")]


def miss(
    served: HttpEngine, api: Api, *, headers: Any = None, changed: Any = None, **fields: Any
) -> str:
    """What is told of a second request whose first message was changed.

    Args:
        headers: Of both requests.
        changed: Of the second one instead.
        fields: Of both bodies.
    """
    number = next(NUMBERS)
    asked = api.body(f"{number}. Where is it?", limit=2, **fields)
    first = served.post(api.path, asked, headers=headers)
    answer = {"role": "assistant", "content": api.read(first.json()).text}
    body = api.body(f"{number}. Who is it?", answer, "And?", limit=2, **fields)
    second = served.post(api.path, body, headers=changed or headers)
    value: str = second.json()["sessionkv"]["cache"]["miss"]["reason"]
    return value


@pytest.mark.parametrize("name", [name for header in HEADERS for name in spelled(header)])
def test_in_a_header_however_it_is_written(served: HttpEngine, name: str) -> None:
    label = f"conversation-{next(NUMBERS)}"
    assert miss(served, CHAT, headers={name: label}) == "history_edited"


@pytest.mark.parametrize("api", [CHAT, MESSAGES], ids=repr)
def test_without_a_name_it_is_another(served: HttpEngine, api: Api) -> None:
    assert miss(served, api) == "first_turn"


@pytest.mark.parametrize(
    "name", ["x-request-id", "x-client-request-id", "x-trace-id", "traceparent"]
)
def test_ids_of_requests_name_nothing(served: HttpEngine, name: str) -> None:
    assert miss(served, CHAT, headers={name: "the-same"}) == "first_turn"


def test_another_name_is_another_conversation(served: HttpEngine) -> None:
    one, other = {"x-session-id": "one"}, {"x-session-id": "other"}
    assert miss(served, CHAT, headers=one, changed=other) == "first_turn"


@pytest.mark.parametrize("field", ["prompt_cache_key", "session_id"])
def test_in_a_field(served: HttpEngine, field: str) -> None:
    assert miss(served, CHAT, **{field: f"by-{field}"}) == "history_edited"


@pytest.mark.parametrize(
    "user", [f"user_abc_account__session_{ID}", f'{{"device_id":"d","session_id":"{ID}"}}']
)
def test_as_claude_code_does(served: HttpEngine, user: str) -> None:
    assert miss(served, MESSAGES, metadata={"user_id": user}) == "history_edited"


def test_in_a_header_of_messages(served: HttpEngine) -> None:
    headers = {"X-Claude-Code-Session-Id": "theirs"}
    assert miss(served, MESSAGES, headers=headers) == "history_edited"
