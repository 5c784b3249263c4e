"""Parameters under either name, null where clients mean nothing, and fields nobody knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.builders.apis import ALL, CHATS, Api
from tests.builders.gateway import MODEL, HttpEngine, http_engine

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def served() -> Iterator[HttpEngine]:
    with http_engine(runner={"never_sample": (256, 258)}) as engine:  # no end tokens
        yield engine


def body(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi"}]
    return {"model": MODEL, "messages": messages, "ignore_eos": True} | fields


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"max_completion_tokens": 3}, 3),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 3, "max_tokens": 9}, 3),
        ({"max_completion_tokens": 9, "max_tokens": 3}, 9),
        ({"max_completion_tokens": None, "max_tokens": 3}, 3),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_either_name_and_the_newer_one_wins(
    served: HttpEngine, fields: dict[str, Any], count: int, stream: bool
) -> None:
    said = CHATS[0].say(served, body(**fields), stream=stream)
    assert (said.usage[2], said.reason) == (count, "length")


REQUESTS = {
    "/v1/chat/completions": "ChatRequest",
    "/v1/completions": "CompletionRequest",
    "/v1/responses": "ResponseRequest",
    "/v1/messages": "MessagesRequest",
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ALL, ids=repr)
def test_null_is_absent_and_unknown_fields_are_ignored(
    served: HttpEngine, api: Api, stream: bool
) -> None:
    schema = served.http.get("/openapi.json").json()["components"]["schemas"]
    fields = schema[REQUESTS[api.path]]["properties"]
    asked = api.body("Hi", limit=3, temperature=0, unheard_of={"x": 1})
    nulls = dict.fromkeys(set(fields) - set(asked))
    assert {"stop", "tools", "stop_sequences", "top_p"} & set(nulls)
    plain = api.say(served, asked, stream=stream)
    assert plain.usage[2] == 3
    nulled = api.say(served, nulls | asked, stream=stream)
    assert (nulled.text, nulled.reason) == (plain.text, plain.reason)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"verbosity": "low"}, "verbosity"),
        ({"service_tier": "scale"}, "service_tier"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": 101}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999": 1}}, "logit_bias[0]"),
        ({"stop": [""]}, "stop[0]"),
        ({"n": 17}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"model": ""}, "model"),
    ],
)
def test_what_is_refused_is_named(served: HttpEngine, fields: dict[str, Any], param: str) -> None:
    answer = served.post(CHAT, body(**fields))
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] in ("invalid_request_error", "not_found_error")


@pytest.mark.parametrize(("content", "code"), [(b"{", "invalid_json"), (b"[]", "invalid_request")])
def test_a_body_that_is_none(served: HttpEngine, content: bytes, code: str) -> None:
    answer = served.http.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code


def test_a_body_of_another_type_is_told_what_to_send(served: HttpEngine) -> None:
    content = json.dumps(body(max_tokens=1)).encode()
    for name in ("text/plain", "application/x-www-form-urlencoded"):
        answer = served.http.post(CHAT, content=content, headers={"content-type": name})
        assert answer.status_code == 415, answer.text
        assert "Content-Type: application/json" in answer.json()["error"]["message"]
    assert served.http.post(CHAT, content=content).status_code == 200


def test_unknown_routes_have_the_apis_shape(served: HttpEngine) -> None:
    assert served.http.get("/v1/nothing").json()["error"]["code"] == "not_found"
    assert served.http.get(CHAT).json()["error"]["code"] == "method_not_allowed"
