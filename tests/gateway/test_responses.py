"""Responses over HTTP: made, streamed, gone on from, read again, deleted; all of it kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import TypeAdapter

from sessionkv.client.results import NodeInfo
from sessionkv.gateway.conversations import NAMES
from sessionkv.gateway.openai.response_ids import session_of
from sessionkv.types.reply_style import ReplyStyle
from tests.builders.engine import engine_config, socket_engine
from tests.builders.gateway import MODEL, HttpEngine, gateway, http_engine, replies

URL = "/v1/responses"
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SAID = ("Hello there.", "And again.", "<think>Hm.</think>Third.")
HELPER = {"x-sessionkv-helper": "true"}
STYLE = ReplyStyle("hermes", ("<think>", "</think>"))
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}


@pytest.fixture(scope="module")
def served() -> Iterator[HttpEngine]:
    with http_engine(runner={"script": replies(*SAID)}, reply_style=STYLE) as engine:
        yield engine


def ask(served: Any, text: Any = "Hi", status: int = 200, **fields: Any) -> dict[str, Any]:
    body = json.dumps({"model": MODEL, "input": text} | fields)  # ASCII: surrogates go through
    answer = served.http.post(URL, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    value: dict[str, Any] = answer.json()
    if status == 200:
        Response.model_validate(value)
    return value


def node_of(served: HttpEngine, body: dict[str, Any]) -> NodeInfo:
    with served.engine.client() as client:
        return client.session(session_of(body["id"])).node()


def heads(served: HttpEngine) -> set[str]:
    with served.engine.client() as client:
        return {session.name for session in client.sessions("~")}


def get(served: Any, response_id: str, status: int = 200) -> dict[str, Any]:
    answer = served.http.get(f"{URL}/{response_id}")
    assert answer.status_code == status, answer.text
    value: dict[str, Any] = answer.json()
    return value


def text_of(body: dict[str, Any]) -> str:
    return "".join(
        part["text"]
        for item in body["output"]
        if item["type"] == "message"
        for part in item["content"]
    )


def refusal(served: Any, status: int = 400, **fields: Any) -> dict[str, Any]:
    error: dict[str, Any] = ask(served, status=status, **fields)["error"]
    return error


def test_a_response_has_text_usage_and_report(served: HttpEngine) -> None:
    body = ask(served, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, user="me")
    assert (body["status"], body["error"], body["incomplete_details"]) == ("completed", None, None)
    assert text_of(body) == "Hello there."
    assert (body["instructions"], body["metadata"]) == ("Be brief.", {"a": "b"})
    assert (body["temperature"], body["top_p"], body["user"]) == (0.5, 1.0, "me")
    usage, report = body["usage"], body["sessionkv"]["cache"]
    assert usage["output_tokens"] == len("Hello there.") + 1  # the end token was sampled
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] == report["cached_tokens"]
    assert report["cached_tokens"] + report["computed_tokens"] == usage["input_tokens"]
    assert body["sessionkv"]["node"].startswith("n-")


def test_a_conversation_goes_on_from_a_response_and_finds_its_cache(served: HttpEngine) -> None:
    first = ask(served, "one")
    second = ask(served, "two", previous_response_id=first["id"])
    assert text_of(second) == "And again."
    assert second["previous_response_id"] == first["id"]
    cached = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["input_tokens"] + len("Hello there.") - 4
    third = ask(served, "three", previous_response_id=second["id"])
    assert [item["type"] for item in third["output"]] == ["reasoning", "message"]
    assert third["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert third["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_any_response_can_be_gone_on_from_any_number_of_times(served: HttpEngine) -> None:
    first = ask(served, "one")
    second = ask(served, "two", previous_response_id=first["id"])
    branches = [ask(served, f"b{i}", previous_response_id=first["id"]) for i in range(3)]
    assert {text_of(branch) for branch in branches} == {"And again."}
    assert len({branch["id"] for branch in (first, second, *branches)}) == 5
    assert get(served, first["id"])["output"] == first["output"]


def test_a_stream_says_the_same_in_the_order_of_the_api(served: HttpEngine) -> None:
    first = ask(served, "one")
    second = ask(served, "two", previous_response_id=first["id"])
    events = served.stream(
        URL,
        {"model": MODEL, "input": "3", "stream": True, "previous_response_id": second["id"]},
    )
    for event in events:
        EVENTS.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] == "completed"
    assert {event["response"]["id"] for event in events if "response" in event} == {
        events[0]["response"]["id"]
    }
    deltas = [event["delta"] for event in events if event["type"].endswith("output_text.delta")]
    assert "".join(deltas) == "Third."
    body = events[-1]["response"]
    assert body["sessionkv"]["cache"]["cached_tokens"] > 0
    stored = get(served, body["id"])
    assert stored.pop("sessionkv") == {"node": body.pop("sessionkv")["node"]}
    assert stored == body


def test_a_stored_response_is_read_as_it_was_answered(served: HttpEngine) -> None:
    first = ask(served, "one", tools=[TOOL], instructions="Be brief.", max_output_tokens=5)
    assert first["status"] == "incomplete"
    assert first["incomplete_details"] == {"reason": "max_output_tokens"}
    assert first["output"][0]["status"] == "incomplete"
    stored = get(served, first["id"])
    assert stored.pop("sessionkv") == {"node": first.pop("sessionkv")["node"]}
    assert stored == first
    assert [tool["name"] for tool in stored["tools"]] == ["look"]


def test_items_that_came_in_are_listed(served: HttpEngine) -> None:
    given = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    first = ask(served, given, instructions="Be brief.")
    url = f"{URL}/{first['id']}/input_items"
    listed = served.http.get(url, params={"order": "asc"}).json()
    ResponseItemList.model_validate(listed)
    said = [(item["role"], item["content"][0]["text"]) for item in listed["data"]]
    assert said == [
        ("developer", "Be kind."),
        ("user", "one"),
        ("assistant", "two"),
        ("user", "three"),
    ]
    newest = served.http.get(url, params={"limit": 1}).json()
    assert (newest["data"], newest["has_more"]) == ([listed["data"][-1]], True)
    after = served.http.get(url, params={"after": newest["last_id"]}).json()
    assert after["data"] == listed["data"][2::-1]
    assert served.http.get(url, params={"after": "msg_1"}).status_code == 404
    second = ask(served, "four", previous_response_id=first["id"])
    own = served.http.get(f"{URL}/{second['id']}/input_items").json()["data"]
    assert [item["content"][0]["text"] for item in own] == ["four"]
    # An item may be referred to instead of being sent again.
    reference = [{"type": "item_reference", "id": listed["data"][1]["id"]}]
    third = ask(served, reference)
    own = served.http.get(f"{URL}/{third['id']}/input_items").json()["data"]
    assert [item["content"][0]["text"] for item in own] == ["one"]
    error = refusal(served, 404, text=[{"type": "item_reference", "id": "msg_1"}])
    assert (error["code"], error["param"]) == ("item_not_found", "input[0].id")


def test_instructions_are_not_inherited_and_items_are(served: HttpEngine) -> None:
    first = ask(
        served, [{"role": "system", "content": "S"}, {"role": "user", "content": "u"}],
        instructions="I",
    )  # fmt: skip
    second = ask(served, "two", previous_response_id=first["id"])
    assert second["instructions"] is None
    node = node_of(served, second)
    assert node.system == "S"
    # Everything before stands behind the new beginning, and none of it is its own input.
    assert [message["content"] for message in node.messages] == ["u", "Hello there.", "two"]
    assert text_of(second) == "And again."
    own = served.http.get(f"{URL}/{second['id']}/input_items").json()["data"]
    assert [item["content"][0]["text"] for item in own] == ["two"]
    third = ask(served, "three", previous_response_id=second["id"], instructions="I")
    assert node_of(served, third).system == "I\n\nS"
    assert text_of(third) == "Third."


def test_deleting_a_response_leaves_those_that_went_on_from_it(served: HttpEngine) -> None:
    first = ask(served, "one")
    second = ask(served, "two", previous_response_id=first["id"])
    deleted = served.http.delete(f"{URL}/{first['id']}")
    assert deleted.json() == {"id": first["id"], "object": "response", "deleted": True}
    assert get(served, first["id"], 404)["error"]["code"] == "response_not_found"
    assert served.http.delete(f"{URL}/{first['id']}").status_code == 404
    error = refusal(served, previous_response_id=first["id"])
    assert error["code"] == "previous_response_not_found"
    assert error["param"] == "previous_response_id"
    third = ask(served, "three", previous_response_id=second["id"])
    assert text_of(third) == "Third."


@pytest.mark.parametrize("previous", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_not_stored_is_not_there_afterwards(
    served: HttpEngine, previous: bool, stream: bool
) -> None:
    fields: dict[str, Any] = {"store": False, "stream": stream}
    if previous:
        fields["previous_response_id"] = ask(served, "one")["id"]
    before, text = heads(served), f"x {stream}"  # each a conversation that is not there yet
    if stream:
        body = served.stream(URL, {"model": MODEL, "input": text} | fields)[-1]["response"]
    else:
        body = ask(served, text, **fields)
    assert text_of(body) == SAID[previous]
    assert body["store"] is False
    get(served, body["id"], 404)
    if previous:
        ask(served, "y", previous_response_id=fields["previous_response_id"])
        (name,) = heads(served) - before
        assert body["id"] not in name
        # Nor where it is written anew, behind other instructions.
        before, fields["instructions"] = heads(served), "Be brief."
        answer = served.post(URL, {"model": MODEL, "input": "z"} | fields)
        assert answer.status_code == 200
        assert heads(served) == before
    else:
        (name,) = heads(served) - before
        assert name.startswith(NAMES)
        # Nothing is left of what says that it only helps.
        before = heads(served)
        answer = served.post(URL, {"model": MODEL, "input": "z"} | fields, headers=HELPER)
        assert answer.status_code == 200
        assert heads(served) == before


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True, "store": False}, "store"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"n": 2}, "n"),
        ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options.mode"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"previous_response_id": "resp_" + "0" * 32, "conversation": "c"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"text": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"text": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"text": [], "tools": [{"type": "x", "a": "\ud83d"}]}, "tools"),
        ({"store": False, "metadata": {"a": "\ud83d"}}, "metadata.a"),
        ({"text": "\ud83d"}, "input[0].content"),
        ({"store": False, "user": "\ud83d"}, "user"),
        ({"store": False, "instructions": "\ud83d"}, "instructions"),
        ({"answer": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"answer": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
    ],
)  # fmt: skip
def test_what_is_not_done_is_refused_by_its_name(
    served: HttpEngine, fields: dict[str, Any], param: str
) -> None:
    if "answer" in fields:
        answer = served.post(URL, {"model": MODEL, "input": "x", "text": fields["answer"]})
        error = answer.json()["error"]
    else:
        error = refusal(served, **fields)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_what_is_not_there_is_not_found(served: HttpEngine) -> None:
    for response_id in ("resp_" + "0" * 32, "resp_1", "x"):
        assert get(served, response_id, 404)["error"]["code"] == "response_not_found"
        for method, path in (("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
            answer = served.http.request(method, f"{URL}/{response_id}{path}")
            assert answer.status_code == 404, (method, path)
        error = refusal(served, previous_response_id=response_id)
        assert error["code"] == "previous_response_not_found"
    assert ask(served, model="gpt-4", status=404)["error"]["code"] == "model_not_found"
    stored = ask(served)
    cancelled = served.http.post(f"{URL}/{stored['id']}/cancel")
    assert (cancelled.status_code, cancelled.json()["error"]["param"]) == (400, "cancel")
    streamed = served.http.get(f"{URL}/{stored['id']}", params={"stream": "true"})
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "stream")


def pins(served: HttpEngine, body: dict[str, Any]) -> str:
    with served.engine.client() as client:
        session = client.session(session_of(body["id"]))
        for _ in range(1000):
            if (pin := session.info().pin) is not None:
                assert pin.expires_s is not None
                hours = (pin.expires_s - body["created_at"]) / 3600
                return f"{pin.tier} {hours:.1f}"
    return ""


def test_a_cache_that_is_wanted_for_longer_is_pinned(tmp_path: Path) -> None:
    config = engine_config(tmp_path, blocks=512, host_blocks=512, disk_bytes=64 * 1024**2)
    with http_engine(config) as served:
        for fields, expected in (
            ({"prompt_cache_retention": "24h"}, "disk 24.0"),
            ({"prompt_cache_retention": "in-memory"}, "host 0.2"),
            ({"prompt_cache_options": {"ttl": "12h"}}, "disk 12.0"),
            ({"prompt_cache_options": {"ttl": "30m"}}, "host 0.5"),
        ):
            assert pins(served, ask(served, max_output_tokens=4, **fields)) == expected


def test_helpers_of_other_conversations_are_not_kept(served: HttpEngine) -> None:
    before = heads(served)
    body = ask(served, metadata={"sessionkv_helper": "true"})
    assert body["store"] is False
    assert heads(served) == before


def test_a_response_may_be_compared_to_another(served: HttpEngine) -> None:
    def compare(text: str, other: str, **fields: Any) -> dict[str, Any]:
        options = {"comparison_response_id": other}
        found: dict[str, Any] = ask(served, text, prompt_cache_options=options, **fields)[
            "prompt_cache_diagnostics"
        ]
        return found

    first = ask(served, "diagnosed " * 5)
    hit = compare("two", first["id"], previous_response_id=first["id"])
    assert hit == {"type": "cache_hit"}
    assert compare("diagnosed " * 5, first["id"]) == {"type": "cache_hit"}
    changed = compare("another question", first["id"])
    assert (changed["type"], changed["reason"]) == ("cache_miss", "input_changed")
    assert changed["cache_missed_tokens"] > 0
    tools = compare("diagnosed " * 5, first["id"], tools=[TOOL])
    assert tools["reason"] == "tools_changed"
    missing = compare("x", "resp_" + "0" * 32)
    assert missing == {"type": "comparison_response_not_found"}


def test_a_request_that_says_nothing_is_answered_with_nothing(served: HttpEngine) -> None:
    for text in ([], None):
        body = ask(served, text, instructions="You are an agent.", tools=[{"type": "web_search"}])
        assert (body["status"], body["output"], body["tools"]) == ("completed", [], [])
        assert body["store"] is False
    events = served.stream(URL, {"model": MODEL, "input": [], "stream": True})
    assert [e["type"] for e in events] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    first = ask(served)
    error = refusal(served, text=[], previous_response_id=first["id"])
    assert error["param"] == "input"
    # A system prompt alone is no question, and nothing that could be gone on from.
    error = refusal(served, text=[{"role": "developer", "content": "Be kind."}])
    assert error["param"] == "input"


def test_responses_are_there_after_a_restart_and_their_cache_is_on_disk(tmp_path: Path) -> None:
    config = engine_config(tmp_path / "store", blocks=128, disk_bytes=64 * 1024**2)
    script = {"script": replies(*SAID)}
    with (
        socket_engine(tmp_path, config, runner=script) as engine,
        gateway(engine.endpoint, reply_style=STYLE) as http,
    ):
        first = ask(http, "one", instructions="Be brief.", metadata={"k": "v"})
        second = ask(http, "two", previous_response_id=first["id"], instructions="Be brief.")
        with engine.client() as client:
            client.flush()
    with (
        socket_engine(tmp_path, config, runner=script) as engine,
        gateway(engine.endpoint, reply_style=STYLE) as http,
    ):
        stored = get(http, first["id"])
        assert stored["output"] == first["output"]
        assert (stored["metadata"], stored["usage"]) == ({"k": "v"}, first["usage"])
        third = ask(http, "three", previous_response_id=second["id"], instructions="Be brief.")
        assert text_of(third) == "Third."
        assert third["sessionkv"]["cache"]["disk_tokens"] > 0
        cached = third["usage"]["input_tokens_details"]["cached_tokens"]
        assert cached == third["sessionkv"]["cache"]["cached_tokens"]
        assert cached >= second["usage"]["input_tokens"]
        other = ask(http, "else", previous_response_id=first["id"], instructions="Be brief.")
        assert text_of(other) == "And again."
