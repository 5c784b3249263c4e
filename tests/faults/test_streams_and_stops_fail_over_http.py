"""Held-back text, split characters, stops and token limits, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from sessionkv.text.builtin import END_OF_TEXT, IM_END
from tests.builders.apis import (
    ALL,
    CHAT,
    CHATS,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Api,
    Said,
    says,
)
from tests.builders.engine import engine_config
from tests.builders.gateway import MODEL, HttpEngine, http_engine, tools_folder

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
HALF = "\u3042".encode()
REPLIES: dict[str, Any] = {
    "held": "aST",
    "stops": "one STOP two",
    "early": "ab.cdefg.h",
    "first end": [65, 65, IM_END, 66, 66, 66],
    "second end": [65, 65, END_OF_TEXT, 66, 66, 66],
    "a mark": "a<tool",
    "a thought": "<think>\nab",
    "begun": "<thi",
}
SCRIPT = says(REPLIES)
BEFORE = [*b"half "]
STREAMS = pytest.mark.parametrize("stream", [False, True])


def script(ids: Sequence[int]) -> int:
    if list(ids[: len(BEFORE)]) == BEFORE:
        return [HALF[2], *b" and", IM_END][len(ids) - len(BEFORE) - 2]
    return SCRIPT(ids)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    runner = {"text_dir": tools_folder(tmp_path_factory.mktemp("text")), "script": script}
    with http_engine(runner=runner) as engine:
        yield engine


def say(served: HttpEngine, api: Api, asked: str, *, stream: bool, **fields: Any) -> Said:
    return api.say(served, api.body(asked, **fields), stream=stream)


# Half a character ----------------------------------------------------------------------------


@pytest.mark.parametrize(("last", "shown"), [(HALF[:2], "\u3042 and"), (b"x!", "\ufffd and")])
def test_half_a_character_shows_the_prompt(served: HttpEngine, last: bytes, shown: str) -> None:
    asked = {"model": MODEL, "prompt": [*BEFORE, *last]}
    *chunks, _ = served.stream(COMPLETIONS.path, asked | {"stream": True})
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    assert pieces[0] == shown[0]
    assert "".join(pieces) == shown
    assert served.post(COMPLETIONS.path, asked).json()["choices"][0]["text"] == shown


@STREAMS
def test_half_a_character_of_an_echo_is_shown_twice(served: HttpEngine, stream: bool) -> None:
    body = {"model": MODEL, "prompt": [*BEFORE, *HALF[:2]], "echo": True, "max_tokens": 5}
    said = COMPLETIONS.say(served, body, stream=stream)
    assert said.text == "half \u3042 and"
    alone = COMPLETIONS.say(served, body | {"max_tokens": 0}, stream=stream)
    assert alone.text == "half \ufffd"
    if not stream:
        choice = served.post(COMPLETIONS.path, body | {"logprobs": 0}).json()["choices"][0]
        assert "".join(choice["logprobs"]["tokens"][:5]) == "half "


# Held back -----------------------------------------------------------------------------------


@STREAMS
@pytest.mark.parametrize("limit", [100, 3])
@pytest.mark.parametrize("api", [CHAT, COMPLETIONS, MESSAGES], ids=repr)
def test_text_that_may_begin_a_stop_is_lost(
    served: HttpEngine, api: Api, limit: int, stream: bool
) -> None:
    said = say(served, api, "held", stop=["STOP"], limit=limit, stream=stream)
    assert (said.text, said.reason) == ("aST", "stop" if limit > 3 else "length")
    assert said.usage[2] == min(limit, 4)


@STREAMS
@pytest.mark.parametrize(("asked", "text"), [("a mark", "a<tool"), ("begun", "<thi")])
@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("api", CHATS, ids=repr)
def test_text_that_may_begin_a_call_or_a_thought_is_lost(
    served: HttpEngine, api: Api, asked: str, text: str, ends: bool, stream: bool
) -> None:
    limit = 100 if ends else len(text)
    said = say(served, api, asked, tools=TOOLS, limit=limit, stream=stream)
    assert (said.text, said.reason) == (text, "stop" if ends else "length")
    assert (said.calls, said.thoughts) == ([], "")


@STREAMS
@pytest.mark.parametrize("api", CHATS, ids=repr)
def test_a_thought_that_was_cut_is_lost(served: HttpEngine, api: Api, stream: bool) -> None:
    shown = {"thinking": {"type": "adaptive"}} if api is MESSAGES else {}
    said = say(served, api, "a thought", limit=len("<think>\nab"), stream=stream, **shown)
    assert (said.thoughts.strip(), said.text, said.reason) == ("ab", "", "length")


# Stops ---------------------------------------------------------------------------------------


@STREAMS
@pytest.mark.parametrize("api", [CHAT, COMPLETIONS, MESSAGES], ids=repr)
def test_a_stop_string_is_shown(served: HttpEngine, api: Api, stream: bool) -> None:
    said = say(served, api, "stops", stop=["x", "TOP"], stream=stream)
    assert (said.text, said.reason) == ("one S", "stop")
    assert say(served, api, "stops", stop=["STOP"], stream=stream).text == "one "


def test_a_stop_string_that_has_no_effect_is_taken(served: HttpEngine) -> None:
    answer = served.post(RESPONSES.path, RESPONSES.body("stops", stop="STOP"))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stop"


@STREAMS
@pytest.mark.parametrize("api", [CHAT, COMPLETIONS], ids=repr)
def test_min_tokens_are_ignored(served: HttpEngine, api: Api, stream: bool) -> None:
    said = say(served, api, "early", stop=["."], min_tokens=6, stream=stream)
    assert (said.text, said.reason, said.usage[2]) == ("ab.cdefg", "stop", 9)
    said = say(served, api, "first end", min_tokens=6, stream=stream, limit=9)
    assert (said.reason, said.usage[2]) == ("stop", 7)


@STREAMS
@pytest.mark.parametrize("asked", ["first end", "second end"])
@pytest.mark.parametrize("api", ALL, ids=repr)
def test_an_end_token_is_shown_or_ends_nothing(
    served: HttpEngine, api: Api, asked: str, stream: bool
) -> None:
    said = say(served, api, asked, stream=stream)
    assert (said.text, said.reason, said.usage[2]) == ("AA", "stop", 3)


@STREAMS
@pytest.mark.parametrize("asked", ["first end", "second end"])
@pytest.mark.parametrize("api", [CHAT, COMPLETIONS, RESPONSES], ids=repr)
def test_an_end_token_that_is_to_be_ignored_ends_the_answer(
    served: HttpEngine, api: Api, asked: str, stream: bool
) -> None:
    said = say(served, api, asked, ignore_eos=True, limit=5, stream=stream)
    assert (said.reason, said.usage[2]) == ("length", 5)


# Limits --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow() -> Iterator[HttpEngine]:
    with http_engine(engine_config(max_model_len=64), runner={"script": lambda ids: 97}) as engine:
        yield engine


def of_tokens(served: HttpEngine, api: Api, count: int) -> str:
    """A text by which a prompt has so many tokens."""
    beside = api.say(served, api.body("x", limit=1), stream=False).usage[0] - 1
    return "x" * (count - beside)


@STREAMS
@pytest.mark.parametrize("limit", [1, 4, 5, 10_000, 2**31 - 1])
@pytest.mark.parametrize("api", ALL, ids=repr)
def test_a_limit_past_the_window_hangs_or_lies(
    narrow: HttpEngine, api: Api, limit: int, stream: bool
) -> None:
    body = api.body(of_tokens(narrow, api, 60), limit=limit)
    if limit <= 4 or api is not COMPLETIONS:
        said = api.say(narrow, body, stream=stream)
        assert (said.reason, said.usage[0], said.usage[2]) == ("length", 60, min(limit, 4))
        return
    answer = narrow.post(api.path, body | {"stream": stream})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert (error["n_prompt_tokens"], error["max_tokens"], error["n_ctx"]) == (60, limit, 64)


@STREAMS
@pytest.mark.parametrize("limit", [0, -1, 2**64, "4", 1.5, True])
@pytest.mark.parametrize("api", ALL, ids=repr)
def test_a_limit_that_is_none_is_taken(
    narrow: HttpEngine, api: Api, limit: Any, stream: bool
) -> None:
    answer = narrow.post(api.path, api.body("x", limit=limit, stream=stream))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == api.limit


@STREAMS
@pytest.mark.parametrize("api", [CHAT, COMPLETIONS, RESPONSES], ids=repr)
def test_without_a_limit_the_window_is_none(narrow: HttpEngine, api: Api, stream: bool) -> None:
    body = api.body(of_tokens(narrow, api, 60), limit=None)
    said = api.say(narrow, body, stream=stream)
    assert (said.reason, said.usage[0], said.usage[2]) == ("length", 60, 4)


@STREAMS
@pytest.mark.parametrize("api", ALL, ids=repr)
def test_the_head_of_a_prompt_is_dropped(narrow: HttpEngine, api: Api, stream: bool) -> None:
    answer = narrow.post(api.path, api.body(of_tokens(narrow, api, 70), limit=1, stream=stream))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (70, 64)
