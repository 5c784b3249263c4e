"""JSON that the token limit cut is no whole answer, and a warm prompt changes nothing of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.builders.apis import CHAT, CHATS, MESSAGES, RESPONSES, Api
from tests.builders.gateway import HttpEngine, http_engine

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"enum": [2, 4]}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
ANIMAL = {"type": "json_schema", "name": "animal", "schema": SCHEMA}
HELD: dict[Api, dict[str, Any]] = {
    CHAT: {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "animal", "schema": SCHEMA},
        }
    },
    RESPONSES: {"text": {"format": ANIMAL}},
    MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}


@pytest.fixture(scope="module")
def served() -> Iterator[HttpEngine]:
    with http_engine() as engine:
        yield engine


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", CHATS, ids=repr)
def test_the_grammar_begins_where_the_cache_ends(
    served: HttpEngine, api: Api, stream: bool
) -> None:
    question = f"Which one, {api} {stream}?"
    held = HELD[api] | {"temperature": 0}
    cold = api.say(served, api.body(question, **held), stream=stream)
    animal = json.loads(cold.text)
    assert (animal["kind"] in ("cat", "dog"), animal["legs"] in (2, 4)) == (True, True)
    assert cold.reason == "stop"
    plain = api.say(served, api.body(question, limit=5), stream=stream)
    assert plain.usage[1] == plain.usage[0] - 1
    warm = api.say(served, api.body(question, **held), stream=stream)
    assert warm.usage[1] == warm.usage[0] - 1
    assert (warm.text, warm.reason) == (cold.text, "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", CHATS, ids=repr)
def test_cut_json_ends_by_itself(served: HttpEngine, api: Api, stream: bool) -> None:
    held = HELD[api] | {"temperature": 0}
    whole = api.say(served, api.body("Which?", **held), stream=stream)
    cut = api.say(served, api.body("Which?", limit=4, **held), stream=stream)
    assert (cut.reason, cut.usage[2]) == ("length", 4)
    assert cut.text == whole.text[:4]
