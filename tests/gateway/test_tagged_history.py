"""Agents whose model writes calls as tags: each request goes on from the one before it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sessionkv.gateway.conversations import NAMES
from tests.builders.agent_text import TAGGED_TEMPLATE, tagged_call, write_agent_text
from tests.builders.engine import engine_config
from tests.builders.gateway import MODEL, HttpEngine, http_engine, replies

CODE = "def f():\n    return '  <b>'\n"
FIRST = "<think>\nWhich é?\n</think>\n\nI look.\n\n" + tagged_call(
    "look", n=" 3", on="true", at='{"b":[1]}', code=CODE
)
SECOND = tagged_call("look", n="3", code="3") + "\n" + tagged_call("look", on="False")
AS_WRITTEN = ["I look.\n" + tagged_call("look", n="3", on="True", at='{"b": [1]}'), SECOND]
ONE = "I look.\n" + tagged_call("look", n="4")
MORE = f"{ONE}\n{tagged_call('look', n='5')}" + "x" * 2500
"""It would go on for thousands of tokens more: time enough to hear that it is over."""
CALLS = [
    [{"n": 3, "on": True, "at": {"b": [1]}, "code": CODE}],
    [{"n": 3, "code": "3"}, {"on": False}],
]
SCHEMA = {"type": "object", "properties": {
    "n": {"type": "integer"}, "on": {"type": "boolean"}, "at": {"type": "object"},
    "code": {"type": "string"},
}}  # fmt: skip


def serve(folder: Path, *said: str) -> AbstractContextManager[HttpEngine]:
    folder.mkdir(exist_ok=True)
    text = write_agent_text(folder, template=TAGGED_TEMPLATE)
    runner = {"text_dir": text, "script": replies(*said)}
    return http_engine(engine_config(blocks=900), runner=runner)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    with serve(tmp_path_factory.mktemp("text"), FIRST, SECOND, "Cold.") as engine:
        yield engine


COMMON = {"model": MODEL, "max_tokens": 500, "temperature": 0}


class Chat:
    """Chat Completions."""

    path = "/v1/chat/completions"
    one_call: ClassVar[Mapping[str, Any]] = {"max_tokens": 2700, "parallel_tool_calls": False}

    def body(self, messages: Sequence[Any], **fields: Any) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
        return {**COMMON, "messages": messages, "tools": tools, **fields}

    def usage(self, answer: Any) -> tuple[int, int, int]:
        """Tokens of the prompt, of it from the cache, of the answer."""
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return usage["prompt_tokens"], cached, usage["completion_tokens"]

    def read(self, answer: Any) -> tuple[str, list[Any], list[Any]]:
        """What is said, the arguments of calls, and the messages that follow."""
        message = answer["choices"][0]["message"]
        message.pop("reasoning_content", None)
        calls = message.get("tool_calls") or []
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "cold"} for call in calls
        ]
        arguments = [json.loads(call["function"]["arguments"]) for call in calls]
        return message["content"] or "", arguments, [message, *results]


class Messages:
    """The Messages API; one of its tools is to be loaded later."""

    path = "/v1/messages"
    one_call: ClassVar[Mapping[str, Any]] = {
        "max_tokens": 2700,
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }

    def body(self, messages: Sequence[Any], **fields: Any) -> dict[str, Any]:
        tools = [
            {"name": "other", "input_schema": SCHEMA},
            {"name": "look", "input_schema": SCHEMA, "defer_loading": True},
        ]
        return {**COMMON, "messages": messages, "tools": tools, **fields}

    def usage(self, answer: Any) -> tuple[int, int, int]:
        usage = answer["usage"]
        cached = usage["cache_read_input_tokens"]
        new = usage["input_tokens"] + usage["cache_creation_input_tokens"]
        return new + cached, cached, usage["output_tokens"]

    def read(self, answer: Any) -> tuple[str, list[Any], list[Any]]:
        content = [block for block in answer["content"] if block["type"] != "thinking"]
        said = "".join(block["text"] for block in content if block["type"] == "text")
        calls = [block for block in content if block["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": "cold"} for call in calls
        ]
        answered = {"role": "assistant", "content": content}
        following = [answered, {"role": "user", "content": results}]
        return said, [call["input"] for call in calls], following


APIS = pytest.mark.parametrize("api", [Chat(), Messages()], ids=["chat", "messages"])


def nodes(served: HttpEngine, question: str) -> list[Any]:
    """The longest conversation that begins with a question."""
    with served.engine.client() as client:
        paths = [client.session(info.name).nodes() for info in client.sessions(NAMES)]
    found = [path for path in paths if path[1].messages[0]["content"] == question]
    return max(found, key=len)


def go_on(served: HttpEngine, api: Any, question: str, turns: int) -> list[Any]:
    """Answers to a question and to the results of the calls in them; each goes on from the last."""
    messages: list[Any] = [{"role": "user", "content": question}]
    answers: list[Any] = []
    for _ in range(turns):
        answers.append(served.post(api.path, api.body(messages)).json())
        messages += api.read(answers[-1])[2]
    for before, answer in pairwise(answers):
        prompt, _, said = api.usage(before)
        whole, cached, _ = api.usage(answer)
        assert answer["sessionkv"]["cache"]["miss"]["reason"] == "none"
        assert prompt + said - cached in (0, 1)  # the last token has KV or not
        assert whole > prompt + said
    return answers


@APIS
def test_each_request_finds_all_of_the_one_before(served: HttpEngine, api: Any) -> None:
    question = f"Is it cold? {api.path}"
    answers = go_on(served, api, question, 3)
    read = [api.read(answer) for answer in answers]
    assert [said for said, _, _ in read] == ["I look.", "", "Cold."]
    assert [arguments for _, arguments, _ in read] == [*CALLS, []]
    path = nodes(served, question)
    assert [(node.reply or {}).get("content") for node in path] == [None, FIRST, SECOND, "Cold."]
    told = [[message["role"] for message in node.messages] for node in path[1:]]
    assert told == [["user"], ["tool"], ["tool", "tool"]]


@APIS
def test_one_that_was_changed_is_not_found(served: HttpEngine, api: Any) -> None:
    question = f"Is it warm? {api.path}"
    messages: list[Any] = [{"role": "user", "content": question}]
    answer = served.post(api.path, api.body(messages)).json()
    following = json.loads(json.dumps(api.read(answer)[2]).replace("return", "yield"))
    second = served.post(api.path, api.body([*messages, *following])).json()
    assert api.usage(second)[1] <= api.usage(answer)[0] + FIRST.encode().index(b"return")
    assert len(nodes(served, question)) == 2


@APIS
def test_what_was_found_changes_no_answer(tmp_path: Path, api: Any) -> None:
    """The third answer is made of all ids before it, which are as the template writes them."""
    messages: list[Any] = [{"role": "user", "content": "Is it cold?"}]
    with serve(tmp_path / "warm", *AS_WRITTEN) as served:
        *before, warm = go_on(served, api, "Is it cold?", 3)
    for answer in before:
        messages += api.read(answer)[2]
    with serve(tmp_path / "cold", *AS_WRITTEN) as served:
        cold = served.post(api.path, api.body(messages)).json()
    assert api.usage(cold)[1] == 0
    assert api.usage(cold)[::2] == api.usage(warm)[::2]
    assert api.read(cold)[0] == api.read(warm)[0] != ""


@APIS
def test_an_answer_of_one_call(tmp_path: Path, api: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "Is it cold?"}]
    with serve(tmp_path, MORE, "Cold.") as served:
        first = served.post(api.path, api.body(messages, **api.one_call)).json()
        said, arguments, following = api.read(first)
        assert (said, arguments) == ("I look.", [{"n": 4}])
        prompt, _, size = api.usage(first)
        assert size == len(ONE.encode())
        assert (nodes(served, "Is it cold?")[1].reply or {})["content"] == ONE
        second = served.post(api.path, api.body([*messages, *following], **api.one_call)).json()
        assert api.read(second)[0] == "Cold."
        assert second["sessionkv"]["cache"]["miss"]["reason"] == "none"
        assert prompt + size - api.usage(second)[1] in (0, 1)
        assert [len(node.messages) for node in nodes(served, "Is it cold?")[1:]] == [1, 1]
