"""A coding agent's task over Anthropic's Messages, with all that such agents change on the way.

Each request has another billing line and breakpoints that move to the newest messages; calls and
thoughts are not spelled as the template spells them; helpers' requests come between. Every turn
finds all that came before it all the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sessionkv.gateway.conversations import RUNNING
from tests.builders.agent_text import call, write_agent_text
from tests.builders.engine import engine_config
from tests.builders.gateway import MODEL, HttpEngine, http_engine, replies

MESSAGES = "/v1/messages"
EPHEMERAL = {"type": "ephemeral"}
TOOLS = [
    {
        "name": name,
        "description": f"{name}s a file",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
    }
    for name in ("Read", "Edit", "Bash")
]
STEPS = (
    "<think>\nWhere is it?\n</think>\n\nI look.\n\n" + call("Read", '{"path":"a.py"}'),
    call("Read", '{"path":"b.py", "limit":20}') + "\n" + call("Bash", '{ "cmd" : "ls" }'),
    "Now I change it. \n" + call("Edit", '{"path": "a.py", "old": "\\u00e9\\n", "new": "{}"}'),
    "<think>Done?</think>" + call("Bash", '{"cmd": "pytest -q", "timeout": 1.50}'),
    "It works now.",
    "You are welcome.",
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    folder = write_agent_text(tmp_path_factory.mktemp("text"))
    runner = {"text_dir": folder, "script": replies(*STEPS)}
    with http_engine(engine_config(blocks=4096, host_blocks=4096), runner=runner) as engine:
        yield engine


class Agent:
    """Sends what such an agent sends."""

    def __init__(self, served: HttpEngine) -> None:
        self._served = served
        self.messages: list[dict[str, Any]] = []
        self._requests = 0

    def ask(self, *blocks: dict[str, Any]) -> dict[str, Any]:
        self._requests += 1
        self.messages.append({"role": "user", "content": list(blocks)})
        line = f"x-anthropic-billing-header: cc_version=2.1.9; cch={self._requests:05x};"
        system = [
            {"type": "text", "text": line},
            {"type": "text", "text": "You are an agent.", "cache_control": EPHEMERAL},
            {"type": "text", "text": "Work in /src.", "cache_control": EPHEMERAL},
        ]
        request = {
            "model": MODEL,
            "max_tokens": 32_000,
            "system": system,
            "tools": TOOLS,
            "messages": self._marked(),
            "metadata": {"user_id": f"user_1_session_{self._requests}"},
            "thinking": {"type": "enabled", "budget_tokens": 31_999},
            "stream": False,
        }
        answer = self._served.post(f"{MESSAGES}?beta=true", request)
        assert answer.status_code == 200, answer.text
        value: dict[str, Any] = answer.json()
        self.messages.append({"role": "assistant", "content": self._resent(value["content"])})
        return value

    def _marked(self) -> list[dict[str, Any]]:
        """Breakpoints on the two newest messages of the user."""
        sent: list[dict[str, Any]] = json.loads(json.dumps(self.messages))
        for message in [m for m in sent if m["role"] == "user"][-2:]:
            message["content"][-1]["cache_control"] = EPHEMERAL
        return sent

    def _resent(self, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Keys in another order; what is empty left out."""
        return [dict(reversed(block.items())) for block in blocks]


def results(answer: dict[str, Any]) -> list[dict[str, Any]]:
    uses = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
    return [{"type": "tool_result", "tool_use_id": use, "content": use[-2:]} for use in uses]


def total(usage: dict[str, Any]) -> int:
    counts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return sum(usage[name] for name in counts)


def test_every_turn_finds_all_that_came_before_it(served: HttpEngine) -> None:
    agent = Agent(served)
    reminder = {"type": "text", "text": "<system-reminder>\nToday.\n</system-reminder>"}
    answer = agent.ask(reminder, {"type": "text", "text": "Fix the test."})
    known = total(answer["usage"]) + answer["usage"]["output_tokens"] - 1
    kinds = []
    while (blocks := results(answer)) or len(kinds) == len(STEPS) - 2:
        helper = {"role": "user", "content": "Please write a title for: fix the test"}
        title = {"model": MODEL, "max_tokens": 32, "messages": [helper]}
        assert served.post(MESSAGES, title).status_code == 200
        answer = agent.ask(*(blocks or [{"type": "text", "text": "Thank you."}]))
        usage, miss = answer["usage"], answer["sessionkv"]["cache"]["miss"]
        assert (usage["cache_read_input_tokens"], miss["reason"]) == (known, "none"), kinds
        known = total(usage) + usage["output_tokens"] - 1
        kinds.append(answer["stop_reason"])
    assert kinds == ["tool_use"] * (len(STEPS) - 3) + ["end_turn"] * 2
    with served.engine.client() as client:
        for _ in range(2000):  # what only served a turn goes behind its answer
            if not client.sessions(RUNNING):
                break
        assert client.sessions(RUNNING) == []
