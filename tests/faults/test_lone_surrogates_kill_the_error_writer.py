"""Half a character in a request: an exception in the answer, or one that cannot be written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.builders.gateway import HttpEngine, http_engine

HALF = '"a\\ud83d"'
CALL = f'[{{"id": "c", "type": "function", "function": {{"name": "f", "arguments": {HALF}}}}}]'
PLACES = {
    "messages[0].content": f'"messages": [{{"role": "user", "content": {HALF}}}]',
    "messages[1].tool_calls[0].function.arguments": '"messages": [{"role": "user", "content": "x"},'
    f' {{"role": "assistant", "content": null, "tool_calls": {CALL}}}]',
    "stop": f'"messages": [{{"role": "user", "content": "x"}}], "stop": {HALF}',
    "user": f'"messages": [{{"role": "user", "content": "x"}}], "user": {HALF}',
    "model": f'"messages": [{{"role": "user", "content": "x"}}], "model": {HALF}',
    "tools": '"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function",'
    f' "function": {{"name": "f", "parameters": {{"type": {HALF}}}}}}}]',
}


@pytest.fixture(scope="module")
def served() -> Iterator[HttpEngine]:
    with http_engine() as engine:
        yield engine


@pytest.mark.parametrize("stream", ["false", "true"])
@pytest.mark.parametrize("place", PLACES)
def test_the_field_is_named_and_nothing_leaks(served: HttpEngine, place: str, stream: str) -> None:
    model = "" if place == "model" else '"model": "checksum", '
    body = f'{{{model}"stream": {stream}, {PLACES[place]}}}'
    answer = served.http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(place)
    for leak in ("Traceback", "UnicodeEncodeError", "/sessionkv", "pydantic"):
        assert leak not in answer.text
