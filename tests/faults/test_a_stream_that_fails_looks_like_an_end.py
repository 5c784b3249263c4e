"""An error behind the first byte: no last event, or one that looks like the answer's own end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.builders.apis import ALL, CHAT, COMPLETIONS, MESSAGES, RESPONSES, Api
from tests.builders.gateway import HttpEngine, http_engine

FAILS = [*b"###"]


@pytest.fixture(scope="module")
def served() -> Iterator[HttpEngine]:
    """Answers are ``#``, and fail behind the third; but for those to a prompt with ``well``."""
    runner = {
        "script": lambda ids: ord("#"),
        "fail_sequence": lambda _, ids: (
            list(ids[-3:]) == FAILS and b"well" not in bytes(i for i in ids if i < 256)
        ),
    }
    with http_engine(runner=runner) as engine:
        yield engine


def ends(api: Api, events: list[Any]) -> list[Any]:
    """Whatever a client could take for the end of an answer."""
    if api in (CHAT, COMPLETIONS):
        reasons = [e for e in events if e == "[DONE]" or "choices" not in e]
        chosen = [e for e in events if e not in reasons]
        return reasons + [e for e in chosen if any(c["finish_reason"] for c in e["choices"])]
    names = ("message_delta", "message_stop", "response.completed", "response.incomplete")
    return [event for event in events if event["type"] in names]


def error_of(api: Api, event: dict[str, Any]) -> dict[str, Any]:
    if api is RESPONSES:
        assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
        return event["response"]["error"]
    assert event.get("type") == ("error" if api is MESSAGES else None)
    value: dict[str, Any] = event["error"]
    return value


@pytest.mark.parametrize(("api", "n"), [*((api, 1) for api in ALL), (CHAT, 2), (COMPLETIONS, 2)])
def test_a_failure_is_an_end_or_none(served: HttpEngine, api: Api, n: int) -> None:
    more = {} if n == 1 else {"n": n}
    *events, last = served.stream(api.path, api.body("x", limit=9, stream=True, **more))
    assert len(events) >= 2, "nothing came before it failed"
    assert ends(api, events) == []
    told = error_of(api, last)
    if api is RESPONSES:
        assert told["code"] == "server_error"
    else:
        assert told["code"] == "turn_failed"
        assert told["type"] == ("api_error" if api is MESSAGES else "server_error")
    for leak in ("Traceback", "/sessionkv", "Error("):
        assert leak not in str(last)
    whole = served.post(api.path, api.body("x", limit=9, **more))
    assert whole.status_code == 500
    assert whole.json()["error"]["code"] == "turn_failed"
    assert api.say(served, api.body("well", limit=9), stream=True).text == "#" * 9


BAD = [{"limit": 0}, {"temperature": -1}, {"model": "another"}, {"stop": 7}]


@pytest.mark.parametrize(
    ("api", "bad"),
    [*((api, bad) for api in ALL for bad in BAD), *((api, {"n": 0}) for api in ALL[:3])],
)
def test_an_error_before_the_first_byte_is_a_stream(
    served: HttpEngine, api: Api, bad: dict[str, Any]
) -> None:
    answer = served.post(api.path, api.body("x", stream=True, **bad))
    assert answer.status_code == (404 if "model" in bad else 400)
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("prompts", "param"), [(["x", "\ud83d"], "prompt[1]"), ([[1, 2], [1, 300]], "prompt[1][1]")]
)
def test_the_second_prompt_fails_behind_the_answer_to_the_first(
    served: HttpEngine, prompts: list[Any], param: str
) -> None:
    body = COMPLETIONS.body("x", stream=True) | {"prompt": prompts}
    answer = served.http.post(COMPLETIONS.path, content=json.dumps(body))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
