"""What clients send that templates stumble over: over HTTP it is an answer, or a 400 in words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sessionkv.text.root import RootText
from tests.builders import text as built
from tests.builders.engine import engine_config
from tests.builders.gateway import MODEL, HttpEngine, http_engine, tools_folder
from tests.unit.text.test_habits import BOTH, MAPS, TEXT

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
NAMES = ("chatml", "llama3", "mistral", "gemma")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, HttpEngine]]:
    with http_engine_of("gemma", tmp_path_factory.mktemp("gemma")) as gemma:
        yield {"gemma": gemma}


def http_engine_of(name: str, folder: Path) -> Any:
    text = built.write_folder(name, folder)
    return http_engine(engine_config(blocks=512), runner={"text_dir": text})


def ask(served: HttpEngine, *messages: dict[str, Any], **fields: Any) -> Any:
    body = {"model": MODEL, "messages": messages, "max_tokens": 2, "temperature": 0}
    return served.post(CHAT, body | {"ignore_eos": True} | fields)


@pytest.mark.parametrize("name", NAMES)
def test_a_second_bos_is_added(name: str, tmp_path: Path) -> None:
    text = built.ALL[name]()
    with http_engine_of(name, tmp_path) as served:
        chat = ask(served, USER).json()["usage"]["prompt_tokens"]
        assert chat == len(text.full(RootText(None, None, 0.0), built.read("hi")))
        raw = served.post(
            "/v1/completions", {"model": MODEL, "prompt": "hi", "max_tokens": 1}
        ).json()
        assert raw["usage"]["prompt_tokens"] == len(text.encode_prompt("hi"))


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": "x"}, USER],
        [USER, {"role": "assistant", "content": "x"}, {"role": "assistant", "content": "y"}, USER],
    ],
)
def test_a_refused_order_of_roles_is_a_server_error(
    engines: dict[str, HttpEngine], messages: list[dict[str, Any]]
) -> None:
    served = engines["gemma"]
    for stream in (False, True):
        answer = ask(served, *messages, stream=stream)
        assert answer.status_code == 400
        assert "must alternate user/assistant" in answer.json()["error"]["message"]
    assert ask(served, USER).status_code == 200


def test_two_messages_of_the_user_in_a_row_are_refused(engines: dict[str, HttpEngine]) -> None:
    served = engines["gemma"]
    joined = ask(served, USER, {"role": "user", "content": "there"}).json()
    plain = ask(served, {"role": "user", "content": "hi\n\nthere"}).json()
    assert joined["choices"] == plain["choices"]


def test_a_refused_system_message_is_a_server_error(engines: dict[str, HttpEngine]) -> None:
    served = engines["gemma"]
    folded = ask(served, {"role": "system", "content": "Be brief."}, USER).json()
    plain = ask(served, {"role": "user", "content": "Be brief.\n\nhi"}).json()
    assert folded["choices"] == plain["choices"]


def test_a_developer_message_is_dropped(tmp_path: Path) -> None:
    with http_engine_of("chatml_words", tmp_path) as served:
        said = [
            ask(served, {"role": role, "content": "Say only 42"}, USER).json()
            for role in ("system", "developer")
        ]
        assert said[0]["choices"] == said[1]["choices"]
        assert said[0]["usage"]["prompt_tokens"] == said[1]["usage"]["prompt_tokens"]
        parts = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}]
        merged = ask(served, {"role": "system", "content": "a\n\nb"}, USER).json()
        assert ask(served, *parts, USER).json()["choices"] == merged["choices"]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_a_call_without_content_is_dropped(tmp_path: Path, content: dict[str, Any]) -> None:
    with http_engine(runner={"text_dir": tools_folder(tmp_path)}) as served:
        called = {"role": "assistant", "tool_calls": [CALL]} | content
        result = {"role": "tool", "tool_call_id": "c", "content": "rain"}
        answer = ask(served, USER, called, result, USER)
        assert answer.status_code == 200
        without = ask(served, USER, {"role": "assistant", "content": ""}, result, USER)
        more = answer.json()["usage"]["prompt_tokens"] - without.json()["usage"]["prompt_tokens"]
        assert more == len('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>')


def test_listed_content_is_refused(engines: dict[str, HttpEngine]) -> None:
    served = engines["gemma"]
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    listed = ask(served, {"role": "user", "content": parts}).json()
    assert listed["choices"] == ask(served, USER).json()["choices"]
    image = [{"type": "image_url", "image_url": {"url": "data:x"}}]
    refused = ask(served, {"role": "user", "content": image})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[0].content[0].type"
    assert refused.json()["error"]["message"].endswith("allowed: text")


@pytest.mark.parametrize("template", [MAPS, TEXT, BOTH])
@pytest.mark.parametrize("arguments", ['{"city":"Oslo","n":2}', '{"a":'])
def test_arguments_are_encoded_twice_or_crash(
    tmp_path: Path, template: str, arguments: str
) -> None:
    folder = built.write_words(tmp_path, template)
    with http_engine(runner={"text_dir": folder}) as served:
        call = {**CALL, "function": {"name": "look", "arguments": arguments}}
        history = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, USER]
        first = ask(served, *history)
        assert first.status_code in (200, 400)
        if first.status_code == 200:
            again = ask(served, *history).json()
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (
                again["usage"]["prompt_tokens"] - 1
            )
        else:
            assert first.json()["error"]["code"] == "template_refused"
            assert (template, arguments) == (MAPS, '{"a":')
