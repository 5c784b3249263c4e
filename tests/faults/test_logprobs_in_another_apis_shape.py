"""Log-probabilities of a chat in the shape of completions, or none beside a stream's reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from sessionkv.text.builtin import END_OF_TEXT, IM_END
from tests.builders.gateway import HEAD, MODEL, HttpEngine, http_engine, replies

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


def ends_with(end: int) -> Any:
    """A runner's script: says "a\\xff" and a Thai letter, then ends with this token."""
    said = [97, 0xFF, *"\u0e01".encode()]

    def script(ids: Sequence[int]) -> int:
        opening = [257, *HEAD, 10]
        begun = max(i for i in range(len(ids)) if list(ids[i : i + len(opening)]) == opening)
        done = len(ids) - begun - len(opening)
        return said[done] if done < len(said) else end

    return script


@pytest.mark.parametrize(
    ("end", "stop", "num_tokens"),
    [(END_OF_TEXT, None, 5), (IM_END, None, 6), (IM_END, "\u0e01", 2), (IM_END, "\ufffd", 1)],
)
def test_a_stream_has_those_of_the_whole_answer(
    end: int, stop: str | None, num_tokens: int
) -> None:
    fields = {} if stop is None else {"stop": stop}
    with http_engine(runner={"script": ends_with(end)}) as served:
        (whole,) = served.post(CHAT, body(**fields)).json()["choices"]
        *chunks, _ = served.stream(CHAT, body(stream=True, **fields))
        prompt = "<|im_start|>assistant\n"
        asked = {"model": MODEL, "prompt": prompt, "logprobs": 0} | fields
        (completed,) = served.post("/v1/completions", asked).json()["choices"]
        *pieces, _ = served.stream("/v1/completions", asked | {"stream": True})
    logprobs = [chunk["choices"][0]["logprobs"] or {"content": []} for chunk in chunks]
    assert [entry for part in logprobs for entry in part["content"]] == whole["logprobs"]["content"]
    assert len(whole["logprobs"]["content"]) == num_tokens
    told = [piece["choices"][0]["logprobs"] or {} for piece in pieces]
    for key in ("tokens", "token_logprobs", "text_offset"):
        assert [value for part in told for value in part.get(key, ())] == completed["logprobs"][key]
