"""Responses that call tools: the calls as items, their results as input, over several turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from sessionkv.client.results import NodeInfo
from sessionkv.gateway.openai.response_ids import session_of
from tests.builders.gateway import MODEL, HttpEngine, http_engine, replies
from tests.builders.tool_text import write_tool_text, written_call

URL = "/v1/responses"
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL = {
    "type": "function",
    "name": "look",
    "description": "Look.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    "strict": None,
}
TWO = "Wait." + written_call("look", at="Oslo") + written_call("look", at="Rome")
SAID = (TWO, "Cold and warm.", "Bye.")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    folder = write_tool_text(tmp_path_factory.mktemp("text"))
    with http_engine(runner={"text_dir": folder, "script": replies(*SAID)}) as engine:
        yield engine


def ask(served: HttpEngine, said: Any, status: int = 200, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "input": said, "tools": [TOOL]} | fields
    answer = served.post(URL, body)
    assert answer.status_code == status, answer.text
    value: dict[str, Any] = answer.json()
    if status == 200:
        Response.model_validate(value)
    return value


def calls_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for item in body["output"] if item["type"] == "function_call"]


def results_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "function_call_output", "call_id": call["call_id"], "output": f"{i} degrees"}
        for i, call in enumerate(calls_of(body))
    ]


def node_of(served: HttpEngine, body: dict[str, Any]) -> NodeInfo:
    with served.engine.client() as client:
        return client.session(session_of(body["id"])).node()


def test_calls_are_items_and_their_results_go_on_from_them(served: HttpEngine) -> None:
    first = ask(served, "Where is it cold?", instructions="Be brief.")
    assert [item["type"] for item in first["output"]] == [
        "message",
        "function_call",
        "function_call",
    ]
    calls = calls_of(first)
    assert [json.loads(call["arguments"]) for call in calls] == [{"at": "Oslo"}, {"at": "Rome"}]
    assert {call["name"] for call in calls} == {"look"}
    assert len({call["call_id"] for call in calls}) == 2
    assert first["tools"] == [TOOL]
    second = ask(
        served, results_of(first), previous_response_id=first["id"], instructions="Be brief."
    )
    assert second["output"][0]["content"][0]["text"] == "Cold and warm."
    # The calls as they were sampled are the history: nothing of it is computed again.
    report = second["sessionkv"]["cache"]
    assert report["miss"]["reason"] == "none"
    assert report["cached_tokens"] >= first["usage"]["total_tokens"] - 4
    node = node_of(served, second)
    assert [message["tool_call_id"] for message in node.messages] == [c["call_id"] for c in calls]
    listed = served.http.get(f"{URL}/{second['id']}/input_items", params={"order": "asc"}).json()
    assert [item["output"] for item in listed["data"]] == ["0 degrees", "1 degrees"]
    stored = served.http.get(f"{URL}/{first['id']}").json()
    assert stored["output"] == first["output"]


def test_a_client_that_keeps_the_items_itself_is_understood(served: HttpEngine) -> None:
    first = ask(served, "Where is it cold?", store=False)
    history = [{"role": "user", "content": "Where is it cold?"}, *first["output"]]
    second = ask(served, [*history, *results_of(first)], store=False)
    assert second["output"][0]["content"][0]["text"] == "Cold and warm."
    third = ask(
        served,
        [*history, *results_of(first), *second["output"], {"role": "user", "content": "x"}],
        store=False,
    )
    assert third["output"][0]["content"][0]["text"] == "Bye."
    assert third["usage"]["input_tokens_details"]["cached_tokens"] > 0


def test_calls_are_streamed(served: HttpEngine) -> None:
    body = {"model": MODEL, "input": "Where?", "tools": [TOOL], "stream": True}
    events = served.stream(URL, body)
    for event in events:
        EVENTS.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    pieces: dict[int, str] = {}
    for event in events:
        if event["type"] == "response.function_call_arguments.delta":
            index = event["output_index"]
            pieces[index] = pieces.get(index, "") + event["delta"]
    assert [json.loads(text)["at"] for text in pieces.values()] == ["Oslo", "Rome"]
    whole = events[-1]["response"]["output"]
    assert [whole[index]["arguments"] for index in pieces] == list(pieces.values())
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("store", [False, True])
def test_without_parallel_calls_the_first_ends_the_answer(
    served: HttpEngine, stream: bool, store: bool
) -> None:
    fields = {"parallel_tool_calls": False, "stream": stream, "store": store}
    if stream:
        body = {"model": MODEL, "input": "Where?", "tools": [TOOL]} | fields
        first = served.stream(URL, body)[-1]["response"]
    else:
        first = ask(served, "Where?", **fields)
    assert first["status"] == "completed"
    (call,) = calls_of(first)
    assert first["output"][-1] is call
    if store:
        assert served.http.get(f"{URL}/{first['id']}").json()["output"] == first["output"]
        second = ask(served, results_of(first), previous_response_id=first["id"])
        assert second["output"][0]["content"][0]["text"] == "Cold and warm."


def test_without_tools_or_choice_what_looks_like_a_call_is_text(served: HttpEngine) -> None:
    for fields in ({"tools": []}, {"tool_choice": "none"}):
        body = ask(served, "Where?", **fields)
        (item,) = body["output"]
        assert item["content"][0]["text"] == TWO
        assert served.http.get(f"{URL}/{body['id']}").json()["output"] == body["output"]


def test_other_instructions_or_tools_write_the_whole_conversation_anew(
    served: HttpEngine,
) -> None:
    first = ask(served, "Where is it cold?", instructions="Be brief.")
    other = {**TOOL, "name": "see"}
    for fields in ({"instructions": "Be long."}, {"tools": [TOOL, other]}):
        second = ask(served, results_of(first), previous_response_id=first["id"], **fields)
        assert second["output"][0]["content"][0]["text"] == "Cold and warm."
        node = node_of(served, second)
        roles = [message["role"] for message in node.messages]
        assert roles == ["user", "assistant", "tool", "tool"]
        ids = [call["id"] for call in node.messages[1]["tool_calls"]]
        assert ids == [call["call_id"] for call in calls_of(first)]
        assert node.messages[1]["content"] == "Wait."


def test_tools_are_refused_where_the_model_has_no_way_to_call_them(tmp_path: Path) -> None:
    with http_engine() as plain:
        error = ask(plain, "Where?", status=400)["error"]
        assert error["param"] == "tools"
        ask(plain, "Where?", tools=[{"type": "web_search"}])


def test_a_call_may_be_demanded(served: HttpEngine) -> None:
    other = {**TOOL, "name": "see", "parameters": {"type": "object", "properties": {}}}
    for choice in ("required", {"type": "function", "name": "see"}):
        body = ask(
            served,
            "Go on.",
            tools=[other],
            tool_choice=choice,
            parallel_tool_calls=False,
            instructions="Scripts end after three answers.",
            max_output_tokens=100,
            temperature=0,
        )
        (call,) = body["output"]
        assert (call["type"], call["name"]) == ("function_call", "see")
        assert body["tool_choice"] == choice


def test_an_answer_may_be_held_to_a_schema(served: HttpEngine) -> None:
    form = {
        "type": "json_schema",
        "name": "color",
        "strict": True,
        "schema": {"type": "object", "properties": {"c": {"enum": ["red", "blue"]}},
                   "required": ["c"], "additionalProperties": False},
    }  # fmt: skip
    body = ask(served, "Which?", tools=[], text={"format": form}, temperature=0)
    text = body["output"][0]["content"][0]["text"]
    assert json.loads(text)["c"] in ("red", "blue")
    assert body["text"]["format"] == form


def test_a_client_that_sends_all_again_goes_on_where_it_was(served: HttpEngine) -> None:
    start: list[Any] = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Where is it cold?"},
    ]
    first = ask(served, start, instructions="Be brief.")
    history = [*start, *first["output"], *results_of(first)]
    second = ask(served, history, instructions="Be brief.")
    assert second["output"][0]["content"][0]["text"] == "Cold and warm."
    assert node_of(served, second).parent == first["sessionkv"]["node"]
    assert second["sessionkv"]["cache"]["miss"]["reason"] == "none"
    # Other words under the same ids are other words.
    changed = [dict(item) for item in history]
    changed[1]["content"] = "Where is it warm?"
    third = ask(served, changed, instructions="Be brief.")
    assert node_of(served, third).parent != first["sessionkv"]["node"]
    said = node_of(served, third).messages[0]["content"]
    assert said == "Where is it warm?"
