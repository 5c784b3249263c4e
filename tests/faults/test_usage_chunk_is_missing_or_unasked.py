"""Streams that end without the usage asked for, or with a chunk that nobody asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.builders.apis import ALL, MESSAGES, RESPONSES, Api
from tests.builders.gateway import MODEL, HttpEngine, http_engine

ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
}


@pytest.fixture(scope="module")
def served() -> Iterator[HttpEngine]:
    with http_engine(runner={"script": lambda ids: 97}) as engine:
        yield engine


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": False}, None, {}])
@pytest.mark.parametrize("path", ASKED)
def test_a_usage_chunk_comes_where_it_is_asked_for_alone(
    served: HttpEngine, path: str, options: Any
) -> None:
    body = {"model": MODEL, "stream": True, "stream_options": options, "max_tokens": 5}
    *chunks, done = served.stream(path, body | {"ignore_eos": True} | ASKED[path])
    assert done == "[DONE]"
    if not options or not options["include_usage"]:
        assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)
        return
    *chunks, last = chunks
    assert all(len(chunk["choices"]) == 1 and chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    usage = last["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5


def report(api: Api, served: HttpEngine, body: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    """What the engine says of an answer, where the documents say that it is."""
    if not stream:
        answer = served.post(api.path, body).json()
    elif api is RESPONSES:
        answer = served.stream(api.path, body | api.streaming)[-1]["response"]
    else:
        events = served.stream(api.path, body | api.streaming)
        answer = events[-1] if api is MESSAGES else events[-2]
    value: dict[str, Any] = answer["sessionkv"]["cache"]
    return value


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ALL, ids=repr)
def test_usage_is_not_the_engines(served: HttpEngine, api: Api, stream: bool) -> None:
    body = api.body(f"a question of {api}, {stream}", limit=5)
    prompt, known, said = api.say(served, body, stream=stream).usage
    assert (known < prompt - 1, said) == (True, 5)
    again, cached, said = api.say(served, body, stream=stream).usage
    assert (again, cached, said) == (prompt, prompt - 1, 5)
    told = report(api, served, body, stream=stream)
    assert (told["prompt_tokens"], told["cached_tokens"]) == (prompt, cached)
    assert told["cached_tokens"] + told["computed_tokens"] == prompt
    assert told["device_tokens"] + told["host_tokens"] + told["disk_tokens"] == cached
