"""Completions over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.builders.engine import greedy, oracle
from tests.builders.gateway import MODEL, HttpEngine, http_engine

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def served() -> Iterator[HttpEngine]:
    with http_engine(runner={"script": lambda ids: 65 + len(ids) % 26}) as engine:
        yield engine


def ask(served: HttpEngine, **fields: Any) -> dict[str, Any]:
    answer = served.post(PATH, {"model": MODEL, "prompt": "ab", "max_tokens": 4} | fields)
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


def texts(answer: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == [*range(len(answer["choices"]))]
    return [choice["text"] for choice in answer["choices"]]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("ab", ["CDEF"]),
        ([97, 98], ["CDEF"]),
        (["ab", "abc"], ["CDEF", "DEFG"]),
        ([[97, 98], [97, 98, 99]], ["CDEF", "DEFG"]),
    ],
)
def test_prompts_in_every_form(served: HttpEngine, prompt: Any, said: list[str]) -> None:
    answer = ask(served, prompt=prompt)
    assert texts(answer) == said
    assert answer["usage"]["prompt_tokens"] == sum(range(2, 2 + len(said)))
    assert answer["usage"]["completion_tokens"] == 4 * len(said)
    assert answer["choices"][0]["finish_reason"] == "length"


def test_several_answers_to_several_prompts(served: HttpEngine) -> None:
    answer = ask(served, prompt=["ab", "abc"], n=2)
    assert texts(answer) == ["CDEF", "CDEF", "DEFG", "DEFG"]
    assert answer["usage"]["prompt_tokens"] == 5


def test_sixteen_tokens_unless_told(served: HttpEngine) -> None:
    assert len(texts(ask(served, max_tokens=None))[0]) == 16


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
def test_echo(served: HttpEngine, prompt: Any) -> None:
    assert texts(ask(served, prompt=prompt, echo=True)) == ["abCDEF"]
    assert texts(ask(served, prompt=prompt, echo=True, max_tokens=0)) == ["ab"]


def test_a_stream_says_the_same(served: HttpEngine) -> None:
    *chunks, usage, done = served.stream(
        PATH,
        {
            "model": MODEL, "prompt": ["ab", "abc"], "max_tokens": 4, "stream": True, "echo": True,
            "stream_options": {"include_usage": True},
        },
    )  # fmt: skip
    said = {0: "", 1: ""}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        said[choice["index"]] += choice["text"]
        assert chunk["usage"] is None
    assert said == {0: "abCDEF", 1: "abcDEFG"}
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 5 + 8
    assert done == "[DONE]"


def test_log_probabilities_in_the_shape_of_completions(served: HttpEngine) -> None:
    told = ask(served, logprobs=2)["choices"][0]["logprobs"]
    assert told["tokens"] == ["C", "D", "E", "F"]
    assert told["text_offset"] == [0, 1, 2, 3]
    assert all(len(tops) == 2 for tops in told["top_logprobs"])
    assert all(value <= 0 for value in told["token_logprobs"])


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
@pytest.mark.parametrize("most", [0, 2])
def test_log_probabilities_of_the_prompt(served: HttpEngine, prompt: Any, most: int) -> None:
    answer = ask(served, prompt=prompt, echo=True, logprobs=1, max_tokens=most)
    told = answer["choices"][0]["logprobs"]
    assert told["tokens"] == [*"abcDE"[: 3 + most]]
    assert told["text_offset"] == [*range(3 + most)]
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert all(value <= 0 for value in told["token_logprobs"][1:])
    assert all(len(tops) == 1 for tops in told["top_logprobs"][1:])
    assert answer["sessionkv"]["cache"]["miss"]["reason"] == "bypassed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"prompt": ["a"] * 9, "n": 15}, "n"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": [[1]] * 129}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, 300]}, "prompt[1]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_what_is_refused_is_named(served: HttpEngine, fields: Any, param: str) -> None:
    answer = served.post(PATH, {"model": MODEL, "prompt": "ab"} | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_what_is_generated_is_the_engines(served: HttpEngine) -> None:
    with http_engine() as engine:
        answer = engine.post(
            PATH, {"model": MODEL, "prompt": [5, 6, 7], "temperature": 0, "max_tokens": 3}
        )
        expected = bytes(oracle([5, 6, 7], greedy(3))).decode(errors="replace")
        assert answer.json()["choices"][0]["text"] == expected
