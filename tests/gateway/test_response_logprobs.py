"""Log-probabilities of the text of a response, and of nothing else that its tokens spell."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import openai
import pytest

from sessionkv.gateway.openai.text_logprobs import TextLogprobs, ToldText
from sessionkv.gateway.replies import ReplyParser
from sessionkv.types import TokenLogprob
from sessionkv.types.reply_style import ReplyStyle
from tests.builders.gateway import MODEL, HttpEngine, http_engine, replies
from tests.builders.tool_text import write_tool_text, written_call

URL = "/v1/responses"
STYLE = ReplyStyle("hermes", ("<think>", "</think>"))
LOGPROBS = "message.output_text.logprobs"
CALL = written_call("look", at="Oslo")
SAID = f"<think>Text?</think>\n\nCafé t<o> text.\n{CALL}"
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    folder = write_tool_text(tmp_path_factory.mktemp("text"))
    script = {"text_dir": folder, "script": replies(SAID, "Bye.")}
    with http_engine(runner=script, reply_style=STYLE) as engine:
        yield engine


def parts(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        part for item in body["output"] if item["type"] == "message" for part in item["content"]
    ]


def spelled(entries: list[dict[str, Any]]) -> str:
    return b"".join(bytes(entry["bytes"]) for entry in entries).decode()


ASK = {"model": MODEL, "input": "Hi", "tools": [TOOL], "include": [LOGPROBS], "top_logprobs": 2}


def test_each_token_of_the_text_has_its_own(served: HttpEngine) -> None:
    body = served.post(URL, ASK).json()
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call"]
    (part,) = parts(body)
    assert spelled(part["logprobs"]) == part["text"] == "Café t<o> text."
    assert body["top_logprobs"] == 2
    for entry in part["logprobs"]:
        assert len(entry["top_logprobs"]) == 2
        assert entry["logprob"] <= 0
        assert all(one["logprob"] >= two["logprob"] for one, two in pairwise(entry["top_logprobs"]))
    # They are told once, with the answer.
    stored = served.http.get(f"{URL}/{body['id']}").json()
    assert parts(stored) == [{**part, "logprobs": []}]


def test_a_stream_tells_the_same_as_it_comes(served: HttpEngine) -> None:
    events = served.stream(URL, ASK | {"stream": True})
    (part,) = parts(events[-1]["response"])
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert len(deltas) > 5
    assert [entry for e in deltas for entry in e["logprobs"]] == part["logprobs"]
    assert spelled(part["logprobs"]) == part["text"]
    (done,) = [e for e in events if e["type"] == "response.output_text.done"]
    assert done["logprobs"] == part["logprobs"]


@pytest.mark.parametrize(
    ("fields", "tops"),
    [
        ({"include": [LOGPROBS]}, 0),
        ({"top_logprobs": 1}, 1),
        ({"top_logprobs": 0}, None),
        ({}, None),
    ],
)
def test_they_are_told_where_they_are_asked_for(
    served: HttpEngine, fields: dict[str, Any], tops: int | None
) -> None:
    body = served.post(URL, {"model": MODEL, "input": "Hi"} | fields).json()
    (part,) = parts(body)
    assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == (
        set() if tops is None else {tops}
    )


def test_the_official_clients_read_them(served: HttpEngine) -> None:
    options: dict[str, Any] = {"base_url": f"{served.url}/v1", "api_key": "none"}

    async def ask() -> Any:
        async with openai.AsyncOpenAI(**options) as client:
            return await client.responses.create(model=MODEL, input="Hi", include=[LOGPROBS])

    with openai.OpenAI(**options) as client:
        body = client.responses.create(model=MODEL, input="Hi", include=[LOGPROBS])
    texts = []
    for answer in (body, asyncio.run(ask())):
        (message,) = [item for item in answer.output if item.type == "message"]
        (part,) = message.content
        texts.append("".join(entry.token for entry in part.logprobs if len(entry.bytes) == 1))
    assert texts[0].startswith("Caf")
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        # A control token that is not shown, a token over two parts, half characters.
        ([b"a", b"<|x|>", b"b"], [b"a", b"b"]),
        ([b"<think>", b"th</think>th", b"th"], [b"th</think>th", b"th"]),
        ([b"\xc3", b"\xa9", b"<", b"<", b"x"], [b"\xc3", b"\xa9", b"<", b"<", b"x"]),
        ([b"a<tool_call>", b'\n{"name": "look", "arguments": {}}\n', b"</tool_call>"],
         [b"a<tool_call>"]),
    ],
)  # fmt: skip
def test_a_text_has_the_tokens_that_spell_it(pieces: list[bytes], expected: list[bytes]) -> None:
    parser, told = ReplyParser(STYLE), TextLogprobs(STYLE, tops=0)
    text = b"".join(piece for piece in pieces if piece != b"<|x|>").decode()
    told.take(tuple((TokenLogprob(i, -1.0),) for i in range(len(pieces))), dict(enumerate(pieces)))
    events = [*told.feed(parser, text), *told.told(parser.end())]
    found = [
        bytes(e["bytes"]) for event in events if isinstance(event, ToldText) for e in event.logprobs
    ]
    assert found == expected
