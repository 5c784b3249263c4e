"""Log-probabilities of a chat in the shape of completions, or none beside a stream's reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.builders.gateway import MODEL, HttpEngine, http_engine, replies

CHAT = "/v1/chat/completions"
SAID = "a\u0e01"


@pytest.fixture(scope="module")
def served() -> Iterator[HttpEngine]:
    with http_engine(runner={"script": replies(SAID)}) as engine:
        yield engine


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "logprobs": True} | (
        fields
    )


def check(content: list[dict[str, Any]], tops: int) -> None:
    spelled = b"".join(bytes(entry["bytes"]) for entry in content)
    assert spelled == SAID.encode() + b"<|im_end|>"
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == tops
        assert all(set(top) == {"token", "logprob", "bytes"} for top in entry["top_logprobs"])


@pytest.mark.parametrize(("asked", "tops"), [(None, 0), (0, 0), (2, 2)])
def test_each_token_has_its_bytes(served: HttpEngine, asked: int | None, tops: int) -> None:
    (choice,) = served.post(CHAT, body(top_logprobs=asked)).json()["choices"]
    assert choice["finish_reason"] == "stop"
    check(choice["logprobs"]["content"], tops)
    *chunks, _ = served.stream(CHAT, body(top_logprobs=asked, stream=True))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[-1]["finish_reason"] == "stop"
    assert "".join(choice["delta"].get("content", "") for choice in choices) == SAID
    told = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", [])]
    check(told, tops)


def test_tops_without_log_probabilities_are_refused(served: HttpEngine) -> None:
    answer = served.post(CHAT, body(logprobs=False, top_logprobs=2))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "top_logprobs"
