"""Faults of gateways, through Anthropic's Messages: errors that are no errors, text that cannot be.

An error after the first byte must not look like an answer's end, a lone surrogate must not become
a server's failure, and a client that leaves must not leave its turn running.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from sessionkv.gateway.conversations import NAMES, RUNNING
from tests.builders.agent_text import write_agent_text
from tests.builders.engine import StepGate, engine_config
from tests.builders.gateway import MODEL, http_engine

MESSAGES = "/v1/messages"
LONE = "a\\ud83d"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 20, "messages": [user("Hi")], **fields}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_an_error_after_the_first_byte_is_an_event_and_the_end() -> None:
    runner = {"fail_sequence": lambda seq_id, ids: ids[-3:] == [97] * 3, "script": lambda ids: 97}
    with http_engine(runner=runner) as engine:
        with engine.http.stream("POST", MESSAGES, json=body(stream=True)) as response:
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        told = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert told[0]["type"] == "message_start"
        assert told[-1]["type"] == "error"
        assert told[-1]["error"]["type"] == "api_error"
        assert [event["type"] for event in told].count("error") == 1
        assert not {"message_delta", "message_stop"} & {event["type"] for event in told}
        whole = engine.post(MESSAGES, body())
        assert (whole.status_code, whole.json()["error"]["type"]) == (500, "api_error")
        assert "Error(" not in whole.text


@pytest.mark.parametrize(
    ("place", "param"),
    [
        ('{"role": "user", "content": "%s"}', "messages[0].content"),
        (
            '{"role": "user", "content": [{"type": "text", "text": "%s"}]}',
            "messages[0].content[0].text",
        ),
        (
            '{"role": "user", "content": "x"}, {"role": "assistant", "content": [{"type":'
            ' "tool_use", "id": "1", "name": "f", "input": {"k": "%s"}}]}, {"role": "user",'
            ' "content": "y"}',
            "messages[1].content[0].input",
        ),
    ],
)
def test_a_lone_surrogate_is_the_clients_fault_wherever_it_is(
    tmp_path: Any, place: str, param: str
) -> None:
    with http_engine(runner={"text_dir": write_agent_text(tmp_path)}) as engine:
        head = f'{{"model": "{MODEL}", "max_tokens": 5, "messages": ['
        for stream in ("false", "true"):
            sent = head + place % LONE + f'], "stream": {stream}}}'
            answer = engine.http.post(
                MESSAGES, content=sent, headers={"content-type": "application/json"}
            )
            assert answer.status_code == 400
            assert param in answer.json()["error"]["param"]
        for field in ("system", "stop_sequences", "tools"):
            value = {"system": '"%s"', "stop_sequences": '["%s"]'}.get(
                field, '[{"name": "f", "input_schema": {"k": "%s"}}]'
            )
            rest = '{"role": "user", "content": "x"}]'
            sent = f'{head}{rest}, "{field}": {value % LONE}}}'
            answer = engine.http.post(
                MESSAGES, content=sent, headers={"content-type": "application/json"}
            )
            assert answer.status_code == 400
            assert field in answer.json()["error"]["param"]


def test_a_client_that_leaves_ends_its_turn() -> None:
    gate = StepGate(when=lambda plan: any(step.start > 60 for step in plan.steps))
    config = engine_config(blocks=512)
    with http_engine(config, gate=gate, runner={"script": lambda ids: 97}) as engine:
        with httpx.Client(base_url=engine.url, timeout=60) as leaving:
            request = body(stream=True, max_tokens=1000)
            with leaving.stream("POST", MESSAGES, json=request) as response:
                next(line for line in response.iter_lines() if "text_delta" in line)
            gate.open()
        with engine.engine.client() as client:
            for _ in range(2000):
                leased = client.stats()["ledger"]["device"]["leased"]
                left = [*client.sessions(RUNNING), *client.sessions(NAMES)]
                if not leased and not left:
                    break
            assert (leased, left) == (0, [])
