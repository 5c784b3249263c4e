"""Every example runs, against a real engine process wherever no reply has to make sense."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples import agent, chat, demo, many_sessions, restart
from sessionkv import CacheConfig, EngineConfig, launch

ROOT = Path(__file__).parents[2]
TOOL_CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "17 * 12"}}</tool_call>'


class ScriptedSession:
    """Gives the replies it was made with and keeps what it was sent; forks get their own script."""

    def __init__(self, replies: list[str], forks: dict[str, list[str]] | None = None) -> None:
        self.replies = list(replies)
        self.sent: list[str] = []
        self.forks: dict[str, ScriptedSession] = {
            name: ScriptedSession(script) for name, script in (forks or {}).items()
        }

    def turn(self, text: str, /, *, sampling: Any) -> Any:
        self.sent.append(text)
        return SimpleNamespace(text=self.replies.pop(0))

    def fork(self, name: str) -> ScriptedSession:
        return self.forks[name]


def test_agent_sends_results_only_and_stops_at_the_answer() -> None:
    session = ScriptedSession([f"Let me see. {TOOL_CALL}", "It is 204."])
    outcome = agent.run_agent(session, "17 boxes of 12 eggs?", plan="Directly.")
    assert outcome == agent.Outcome("Directly.", "It is 204.", 2)
    assert session.sent == ["17 boxes of 12 eggs?\nDirectly.", "calculate returned 204"]


def test_agent_tells_the_model_what_was_wrong_with_a_call() -> None:
    calls = [
        '<tool_call>{"name": "fly", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "calculate", "arguments": {"expression": "__import__(\'os\')"}}'
        "</tool_call>",
        '<tool_call>{"name": "calculate", "arguments": {"expression": "1/0"}}</tool_call>',
    ]
    session = ScriptedSession([*calls, "<tool_call>{not json}</tool_call>"])
    outcome = agent.run_agent(session, "task")
    assert session.sent == [
        "task",
        "fly returned error: no tool 'fly'; there are calculate, word_count",
        "calculate returned error: only numbers and + - * /",
        "calculate returned error: division by zero",
    ]
    assert outcome == agent.Outcome("", "<tool_call>{not json}</tool_call>", 4)


def test_agent_that_never_answers_is_ended() -> None:
    session = ScriptedSession([TOOL_CALL] * agent.MAX_STEPS)
    assert agent.run_agent(session, "task") == agent.Outcome("", None, agent.MAX_STEPS)


def test_branches_run_in_forks_and_come_back_in_order() -> None:
    scripts = {"plan-1": ["one"], "plan-2": [TOOL_CALL, "two"], "plan-3": ["three"]}
    session = ScriptedSession([], scripts)
    outcomes = agent.run_branches(session, "task")
    assert [(o.plan, o.answer, o.steps) for o in outcomes] == [
        (agent.PLANS[0], "one", 1),
        (agent.PLANS[1], "two", 2),
        (agent.PLANS[2], "three", 1),
    ]
    assert session.sent == []
    assert session.forks["plan-2"].sent[1] == "calculate returned 204"


def test_agent_branches_share_the_past_on_a_real_engine() -> None:
    with launch("checksum") as engine:
        client = engine.client()
        session = client.open("agent", system=agent.SYSTEM)
        session.turn("Are you ready?", sampling=agent.SAMPLING)
        outcomes = agent.run_branches(session, "task")
        assert [outcome.plan for outcome in outcomes] == list(agent.PLANS)
        cache = client.open("plan-2").turn("again", sampling=agent.SAMPLING).cache
        assert cache.computed_tokens < cache.prompt_tokens // 2


def test_chat_answers_every_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nand again\n"))
    with launch("checksum") as engine:
        chat.chat(engine.client(), "test")
    reports = [line for line in capsys.readouterr().out.splitlines() if "were cached]" in line]
    assert len(reports) == 2
    assert reports[0].startswith("  [0 of ")
    assert not reports[1].startswith("  [0 of ")


def test_many_sessions_lose_nothing_under_pressure() -> None:
    config = EngineConfig(max_model_len=512, cache=CacheConfig(device_blocks=48, host_bytes=2**14))
    with launch("checksum", config=config) as engine:
        rounds = many_sessions.converse(engine.client(), sessions=12, turns=3)
    prompts = [sum(tokens.values()) for tokens in rounds]
    # Every conversation has its whole history in each prompt, whichever tier it came from: each
    # round adds at least the new messages (one token a byte here) and one token of each reply.
    added = 12 * (len("Tell me fact number 1.") + 1)
    assert prompts[1] >= prompts[0] + added
    assert prompts[2] >= prompts[1] + added


def test_restart_reads_the_past_from_disk(tmp_path: Path) -> None:
    restart.before("checksum", str(tmp_path / "store"))
    cache = restart.after("checksum", str(tmp_path / "store"))
    assert cache.disk_tokens > cache.prompt_tokens // 2
    assert cache.device_tokens == cache.host_tokens == 0


def test_demo_shows_every_tier_and_the_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig(cache=CacheConfig(device_blocks=64, host_bytes=2**13))
    acts = demo.Demo("checksum", str(tmp_path / "store"), config=config)
    demo.play(acts)
    stages = [line.stage for line in acts.lines]
    assert stages[: len(demo.OPENING)] == ["talk"] * len(demo.OPENING)
    assert stages[-2:] == ["restart", "restart"]
    restarted = acts.lines[-2].cache
    assert restarted.disk_tokens > restarted.computed_tokens
    assert all(
        line.cache.prompt_tokens == line.cache.cached_tokens + line.cache.computed_tokens
        for line in acts.lines
    )


@pytest.mark.parametrize("name", ["agent", "chat", "demo", "many_sessions", "restart"])
def test_example_explains_itself(name: str) -> None:
    done = subprocess.run(
        [sys.executable, f"examples/{name}.py", "--help"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": "."}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--model" in done.stdout
