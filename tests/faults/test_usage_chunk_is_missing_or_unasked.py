"""Streams that end without the usage asked for, or with a chunk that nobody asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.builders.gateway import MODEL, HttpEngine, http_engine

ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
}


@pytest.fixture(scope="module")
def served() -> Iterator[HttpEngine]:
    with http_engine() as engine:
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
