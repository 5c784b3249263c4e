"""Anthropic's Messages API over HTTP: answers, streams, tools, thinking, usage, breakpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sessionkv.gateway.conversations import NAMES
from sessionkv.types.reply_style import ReplyStyle
from tests.builders.agent_text import call, write_agent_text
from tests.builders.engine import StepGate, engine_config
from tests.builders.gateway import MODEL, HttpEngine, http_engine, replies

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TOOL = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
FIRST = "<think>\nWhich city?\n</think>\n\nI look.\n" + call("look", '{"city": "Oslo"}')
SECOND = "It is cold."


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    folder = write_agent_text(tmp_path_factory.mktemp("text"))
    runner = {"text_dir": folder, "script": replies(FIRST, SECOND)}
    with http_engine(engine_config(blocks=2048, host_blocks=4096), runner=runner) as engine:
        yield engine


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    turns = messages or ("Is it cold?",)
    listed = [m if isinstance(m, dict) else {"role": "user", "content": m} for m in turns]
    return {"model": MODEL, "max_tokens": 500, "messages": listed} | fields


def total(usage: dict[str, Any]) -> int:
    return (
        usage["input_tokens"]
        + usage["cache_creation_input_tokens"]
        + usage["cache_read_input_tokens"]
    )


def events(served: HttpEngine, request: dict[str, Any]) -> list[dict[str, Any]]:
    found = served.stream(MESSAGES, request | {"stream": True})
    return [event for event in found if event["type"] != "ping"]


def assembled(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's events make up; checks their order."""
    assert found[0]["type"] == "message_start"
    assert [event["type"] for event in found[-2:]] == ["message_delta", "message_stop"]
    message = found[0]["message"]
    for event in found[1:-2]:
        index = event["index"]
        if event["type"] == "content_block_start":
            assert index == len(message["content"])
            message["content"].append(dict(event["content_block"]))
            arguments = ""
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], message["content"][index]
            assert index == len(message["content"]) - 1
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
            else:
                key = delta["type"].removesuffix("_delta")
                block[key] += delta[key]
        else:
            assert event["type"] == "content_block_stop"
            if message["content"][index]["type"] == "tool_use":
                message["content"][index]["input"] = json.loads(arguments)
    message |= found[-2]["delta"]
    message["usage"] |= found[-2]["usage"]
    return message


def test_an_answer_without_tools_is_text_whatever_it_looks_like(served: HttpEngine) -> None:
    answer = served.post(MESSAGES, body()).json()
    assert answer["content"] == [{"type": "text", "text": FIRST.partition("</think>\n\n")[2]}]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", MODEL)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert answer["usage"]["output_tokens"] == len(FIRST) + 1


def test_thinking_and_a_call_are_blocks(served: HttpEngine) -> None:
    request = body(tools=[TOOL], thinking={"type": "adaptive"})
    answer = served.post(MESSAGES, request).json()
    thinking, text, use = answer["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Which city?")
    assert thinking["signature"]
    assert text == {"type": "text", "text": "I look."}
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "look", {"city": "Oslo"})
    assert answer["stop_reason"] == "tool_use"


def test_a_stream_says_what_the_whole_answer_says(served: HttpEngine) -> None:
    request = body(tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 1024})
    request["max_tokens"] = 1025
    message = assembled(events(served, request))
    whole = served.post(MESSAGES, request).json()
    for told in (message, whole):
        del told["id"], told["content"][-1]["id"], told["usage"]
    del whole["sessionkv"]
    assert message == whole


def test_thinking_is_told_only_where_it_is_asked_for(served: HttpEngine) -> None:
    kinds = {}
    for name, thinking in (
        ("absent", None),
        ("disabled", {"type": "disabled"}),
        ("omitted", {"type": "adaptive", "display": "omitted"}),
    ):
        answer = served.post(MESSAGES, body(tools=[TOOL], thinking=thinking)).json()
        kinds[name] = [(b["type"], b.get("thinking")) for b in answer["content"]]
    rest = [("text", None), ("tool_use", None)]
    assert kinds == {"absent": rest, "disabled": rest, "omitted": [("thinking", ""), *rest]}


def test_the_next_turn_finds_all_that_came_before(served: HttpEngine) -> None:
    asked = body("Where?", tools=[TOOL], thinking={"type": "adaptive"}, system="Be brief.")
    first = served.post(MESSAGES, asked).json()
    used = first["content"][-1]["id"]
    result = {"type": "tool_result", "tool_use_id": used, "content": "-9"}
    asked["messages"] += [
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    found = events(served, asked)
    start, message = dict(found[0]["message"]["usage"]), assembled(found)
    assert message["content"] == [{"type": "text", "text": SECOND}]
    assert message["stop_reason"] == "end_turn"
    # The last token that was sampled is computed by the turn after it.
    before = total(first["usage"]) + first["usage"]["output_tokens"] - 1
    assert start["cache_read_input_tokens"] == before
    assert message["usage"]["cache_read_input_tokens"] == before
    assert total(start) == total(message["usage"])
    report = found[-1]["sessionkv"]["cache"]
    assert (report["cached_tokens"], report["prompt_tokens"]) == (before, total(start))
    assert report["miss"]["reason"] == "none"


def test_thoughts_and_spaces_that_a_client_drops_cost_no_more_than_themselves(
    served: HttpEngine,
) -> None:
    asked = body("What then?", tools=[TOOL])
    first = served.post(MESSAGES, asked).json()
    text, use = first["content"]
    text["text"] += "\n"
    asked["messages"] += [
        {"role": "assistant", "content": [text, use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"]}]},
    ]
    second = served.post(MESSAGES, asked).json()
    assert second["usage"]["cache_read_input_tokens"] >= total(first["usage"])


@pytest.mark.parametrize(
    ("max_tokens", "reason", "kinds"),
    [(len(FIRST) - 20, "max_tokens", ["text"]), (len(FIRST), "tool_use", ["text", "tool_use"])],
)
def test_a_call_that_is_cut_is_no_call(
    served: HttpEngine, max_tokens: int, reason: str, kinds: list[str]
) -> None:
    request = body(tools=[TOOL], max_tokens=max_tokens)
    answer = served.post(MESSAGES, request).json()
    assert answer["stop_reason"] == reason
    assert [block["type"] for block in answer["content"]] == kinds
    assert events(served, request)[-2]["delta"]["stop_reason"] == reason


def test_stop_sequences(served: HttpEngine) -> None:
    answer = served.post(MESSAGES, body(stop_sequences=["nothing", "look."])).json()
    assert answer["content"] == [{"type": "text", "text": "I "}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "look.")


def test_more_tokens_than_fit_end_at_the_windows_end(tmp_path: Path) -> None:
    config = engine_config(blocks=64, max_model_len=128)
    with http_engine(config, runner={"script": lambda known: 97}) as engine:
        answer = engine.post(MESSAGES, body("x" * 60, max_tokens=32_000)).json()
        assert answer["stop_reason"] == "model_context_window_exceeded"
        assert total(answer["usage"]) + answer["usage"]["output_tokens"] == 128
        for stream in (False, True):
            refused = engine.post(MESSAGES, body("x" * 300, max_tokens=32_000, stream=stream))
            assert refused.status_code == 400
            assert refused.json()["error"]["type"] == "invalid_request_error"
            assert refused.json()["error"]["message"].startswith("prompt is too long: 3")


def test_the_first_call_ends_the_answer_where_calls_must_not_be_parallel(tmp_path: Path) -> None:
    two = call("look", '{"n": 1}') + "\n" + call("look", '{"n": 2}') + "\n"
    # It would go on for thousands of tokens more: time enough to hear that it is over.
    runner = {"text_dir": write_agent_text(tmp_path), "script": replies(two + "x" * 2500)}
    with http_engine(engine_config(blocks=900), runner=runner) as engine:
        one = {"type": "auto", "disable_parallel_tool_use": True}
        for fields, inputs in (
            ({"tool_choice": one, "max_tokens": 2700}, [1]),
            ({"max_tokens": len(two)}, [1, 2]),
        ):
            answer = engine.post(MESSAGES, body(tools=[TOOL], **fields)).json()
            uses = [block["input"]["n"] for block in answer["content"] if "input" in block]
            assert uses == inputs
            assert answer["stop_reason"] == "tool_use"
            assert answer["usage"]["output_tokens"] < 2500


def test_breakpoints_pin_the_conversation(served: HttpEngine) -> None:
    control = {"type": "ephemeral", "ttl": "1h"}
    system = [{"type": "text", "text": "Pinned.", "cache_control": control}]
    asked = body(system=system, cache_control={"type": "ephemeral"})
    usage = served.post(MESSAGES, asked).json()["usage"]
    assert usage["input_tokens"] == 0
    assert usage["cache_creation_input_tokens"] > 0
    assert usage["cache_creation"] == {
        "ephemeral_5m_input_tokens": 0,
        "ephemeral_1h_input_tokens": usage["cache_creation_input_tokens"],
    }
    with served.engine.client() as client:
        for _ in range(1000):
            pins = [info.pin for info in client.sessions(NAMES) if info.pin is not None]
            if pins:
                break
        assert [pin.tier for pin in pins] == ["host"]


def test_a_conversation_has_one_pin_however_many_turns(served: HttpEngine) -> None:
    asked = body("Pin this.", cache_control={"type": "ephemeral"})
    with served.engine.client() as client:

        def pinned() -> set[str]:
            return {info.name for info in client.sessions(NAMES) if info.pin is not None}

        others, names = pinned(), []
        for _ in range(2):
            answer = served.post(MESSAGES, asked).json()
            asked["messages"] += [
                {"role": "assistant", "content": answer["content"]},
                {"role": "user", "content": "And then?"},
            ]
            for _ in range(2000):  # pins are set and taken off behind the answer
                new = pinned() - others
                if len(new) == 1 and new.isdisjoint(names):
                    break
            names += new
    assert len(set(names)) == 2


def test_counted_are_the_prompts_own_tokens(served: HttpEngine) -> None:
    for request in (
        body("How many?"),
        body("How many?", system=[{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]),
        body("How many?", tools=[TOOL]),
    ):
        asked = {key: value for key, value in request.items() if key != "max_tokens"}
        counted = served.post(COUNT, asked).json()
        assert counted == {"input_tokens": total(served.post(MESSAGES, request).json()["usage"])}


def test_a_count_has_the_thoughts_that_are_put_back_and_a_helpers_has_none(
    served: HttpEngine,
) -> None:
    asked = body("Which one?", tools=[TOOL])
    text, use = served.post(MESSAGES, asked).json()["content"]  # its thoughts are not asked for
    asked["messages"] += [
        {"role": "assistant", "content": [text, use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"]}]},
    ]
    fields = {key: asked[key] for key in ("model", "messages", "tools")}
    helper = {"x-sessionkv-helper": "true"}
    counted = served.post(COUNT, fields).json()["input_tokens"]
    alone = served.post(COUNT, fields, headers=helper).json()["input_tokens"]
    assert counted == alone + len(FIRST[: FIRST.index("I look")])
    assert total(served.post(MESSAGES, asked, headers=helper).json()["usage"]) == alone
    assert total(served.post(MESSAGES, asked).json()["usage"]) == counted


def test_the_line_that_counts_requests_is_taken_out_and_reported(served: HttpEngine) -> None:
    def ask(number: int) -> dict[str, Any]:
        line = f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number:05x};"
        system = [{"type": "text", "text": line}, {"type": "text", "text": "You are an agent."}]
        answer: dict[str, Any] = served.post(MESSAGES, body("Same", system=system)).json()
        return answer

    ask(1)
    second = ask(2)
    assert second["usage"]["input_tokens"] == 1  # the last token is always computed
    assert second["sessionkv"]["rewrites"] == [
        {"field": "system", "removed": "x-anthropic-billing-header"}
    ]
    plain = served.post(MESSAGES, body("Same", system="You are an agent.")).json()
    assert total(plain["usage"]) == total(second["usage"])
    assert "rewrites" not in plain["sessionkv"]


def test_diagnostics_say_what_differs(served: HttpEngine) -> None:
    def ask(request: dict[str, Any], previous: str | None) -> dict[str, Any]:
        fields = {"diagnostics": {"previous_message_id": previous}}
        answer: dict[str, Any] = served.post(MESSAGES, request | fields).json()
        return answer

    same = {"system": "A", "tools": [TOOL]}
    first = ask(body("Why?", **same), None)
    assert first["diagnostics"] is None
    cases = {
        None: body(
            "Why?", {"role": "assistant", "content": "So."}, "And?", system="A", tools=[TOOL]
        ),
        "system_changed": body("Why?", system="B", tools=[TOOL]),
        "tools_changed": body("Why?", system="A", tools=[{**TOOL, "name": "see"}]),
        "messages_changed": body("How?", system="A", tools=[TOOL]),
    }
    for expected, request in cases.items():
        found = ask(request, first["id"])["diagnostics"]
        if expected is None:
            assert found is None
            continue
        reason = found["cache_miss_reason"]
        assert reason["type"] == expected
        assert 0 < reason["cache_missed_input_tokens"] <= total(first["usage"])
    unknown = ask(body("Why?"), "msg_none")["diagnostics"]
    assert unknown == {"cache_miss_reason": {"type": "previous_message_not_found"}}
    request = cases["system_changed"] | {"diagnostics": {"previous_message_id": first["id"]}}
    start = events(served, request)[0]["message"]
    assert start["diagnostics"]["cache_miss_reason"]["type"] == "system_changed"


def test_every_answer_has_an_id_of_its_request(served: HttpEngine) -> None:
    answer = served.post(MESSAGES, body())
    assert answer.headers["request-id"].startswith("req_")


@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "any"}, {"look", "see"}), ({"type": "tool", "name": "see"}, {"see"})],
)
def test_a_call_is_made_where_one_must_be(
    tmp_path: Path, choice: dict[str, Any], names: set[str]
) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    tools = [{"name": name, "input_schema": schema} for name in ("look", "see")]
    style = ReplyStyle("hermes")  # whatever the model would say is nothing, and its thoughts too
    runner = {"text_dir": write_agent_text(tmp_path)}
    with http_engine(engine_config(blocks=1024), runner=runner, reply_style=style) as engine:
        one = choice | {"disable_parallel_tool_use": True}
        answer = engine.post(MESSAGES, body(tools=tools, tool_choice=one)).json()
        (use,) = answer["content"]
        assert (use["type"], answer["stop_reason"]) == ("tool_use", "tool_use")
        assert use["name"] in names
        assert use["input"]["n"] in (1, 2)
        form = {"format": {"type": "json_schema", "schema": schema}}
        answer = engine.post(MESSAGES, body(output_config=form)).json()
        assert json.loads(answer["content"][0]["text"])["n"] in (1, 2)


def test_what_must_not_be_called_is_text(served: HttpEngine) -> None:
    answer = served.post(MESSAGES, body(tools=[TOOL], tool_choice={"type": "none"})).json()
    assert [block["type"] for block in answer["content"]] == ["text"]
    assert "<tool_call>" in answer["content"][0]["text"]
    assert answer["stop_reason"] == "end_turn"


def test_a_conversation_is_found_on_disk_and_told_at_the_start(tmp_path: Path) -> None:
    text = write_agent_text(tmp_path)
    runner = {"text_dir": text, "script": replies("Yes, it is.", "Still.")}
    config = engine_config(tmp_path / "store", blocks=256, disk_bytes=2**20)
    asked = body()
    with http_engine(config, runner=runner) as engine:
        first = engine.post(MESSAGES, asked).json()
    asked["messages"] += [
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": "And now?"},
    ]
    with http_engine(config, runner=runner) as engine:
        found = events(engine, asked)
    start, message = dict(found[0]["message"]["usage"]), assembled(found)
    assert message["content"] == [{"type": "text", "text": "Still."}]
    known = total(first["usage"]) + first["usage"]["output_tokens"] - 1
    report = found[-1]["sessionkv"]["cache"]
    assert report["disk_tokens"] == report["cached_tokens"] == start["cache_read_input_tokens"]
    assert known - report["disk_tokens"] < config.cache.block_size  # a last block in part
    assert message["usage"]["cache_read_input_tokens"] == start["cache_read_input_tokens"]


def test_pings_come_while_there_is_nothing_to_say() -> None:
    gate = StepGate()
    with (
        http_engine(gate=gate, runner={"script": lambda known: 97}, ping_s=0.02) as engine,
        engine.http.stream("POST", MESSAGES, json=body(stream=True, max_tokens=3)) as response,
    ):
        lines = response.iter_lines()
        told = [line for _, line in zip(range(12), lines, strict=False)]
        gate.open()
        rest = [line for line in lines if line.startswith("event: ")]
    assert told.count("event: ping") >= 3
    assert "event: content_block_start" not in told
    assert rest[-1] == "event: message_stop"
