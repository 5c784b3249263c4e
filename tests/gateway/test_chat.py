"""Chat Completions over HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.builders.gateway import MODEL, HttpEngine, http_engine, replies

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def served() -> Iterator[HttpEngine]:
    with http_engine(runner={"script": replies("Hello there.", "And again.")}) as engine:
        yield engine


def body(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]} | fields


def test_an_answer_has_text_reason_usage_and_report(served: HttpEngine) -> None:
    answer = served.post(CHAT, body()).json()
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello there."}
    assert choice["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["completion_tokens"] == len("Hello there.") + 1  # the end token was sampled
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    report = answer["sessionkv"]["cache"]
    assert report["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert report["cached_tokens"] + report["computed_tokens"] == usage["prompt_tokens"]


def test_a_stream_says_the_same(served: HttpEngine) -> None:
    *chunks, done = served.stream(CHAT, body(stream=True))
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello there."
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"


def test_models_are_listed(served: HttpEngine) -> None:
    listed = served.http.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == [MODEL]
    assert served.http.get(f"/v1/models/{MODEL}").json()["max_model_len"] == 2049


def test_another_model_is_not_found(served: HttpEngine) -> None:
    answer = served.post(CHAT, body() | {"model": "gpt-4"})
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "model"
    assert answer.json()["error"]["code"] == "model_not_found"
