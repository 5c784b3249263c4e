"""A day's work of coding agents, request by request, as their programs send it.

Both change in each request what they need not: dates at midnight, reminders that go along with the
newest message, the JSON of calls, thoughts left out, helpers' and sub-agents' requests between.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.builders.agent_text import call
from tests.builders.gateway import MODEL, TOOLS, HttpEngine, tools_folder

SESSION = "3f2b8a54-7c1d-4e0f-9a6b-5d4c3b2a1f00"
NUM_STEPS = 34
TOOL_NAMES = ("Read", "Edit", "Bash")
PLAN = (
    "<system-reminder>\nPlan mode is active. The user does not want you to change anything yet: "
    "make no edits, run no tools that change the system.\n</system-reminder>"
)
TODO = "<system-reminder>\nThe list of things to do is empty.\n</system-reminder>"


def replies() -> list[str]:
    """What the model says: calls with thoughts now and then; each eighth answer ends a turn."""
    said = []
    for step in range(NUM_STEPS + 8):
        thoughts = f"<think>\nWhat does part {step} do?\n</think>\n\n" if step % 3 == 0 else ""
        if step % 8 == 7:
            said.append(f"{thoughts}Part {step} is done: it was the case of an empty list.")
        else:
            arguments = f'{{"path":"src/part_{step}.py", "limit" : {step + 20}}}'
            said.append(thoughts + call(TOOL_NAMES[step % 3], arguments))
    return said


def keeping_thoughts(folder: Path) -> Path:
    """Text under a template that writes the thoughts of every answer."""
    tools_folder(folder)
    path = folder / "chat_template.jinja"
    path.write_text(TOOLS.replace(" and loop.index0 > ns.last", ""))
    return folder


@dataclass
class Score:
    """Tokens of all requests but the first of each conversation.

    Attributes:
        reusable: What the request before it left: its prompt and its answer.
        reused: How many of them were found.
    """

    reusable: int = 0
    reused: int = 0

    @property
    def share(self) -> float:
        return self.reused / self.reusable


class Agent(ABC):
    """One conversation of an agent. Requests with ``x-sessionkv-steady`` as told."""

    def __init__(self, served: HttpEngine, score: Score, *, steady: bool) -> None:
        self.served = served
        self.score = score
        self.headers = {"x-sessionkv-steady": str(steady).lower()}
        self.messages: list[dict[str, Any]] = []
        self.day = 30
        self.plans = False
        self.num_requests = 0
        self.misses: list[tuple[int, dict[str, Any]]] = []
        self.rewrites: list[dict[str, str]] = []
        self._before = 0

    def work(self, num_steps: int, task: str) -> None:
        """That many requests: a task, the results of its calls, and what the user says then."""
        self.say(task)
        for step in range(num_steps):
            self.day = 31 if step >= num_steps // 2 else 30
            if step % 6 == 1:
                self.side_request()
            ids = self.ask()
            if ids:
                self.results(ids)
            else:
                self.plans = step + 1 in (8, 16)  # two tasks in plan mode
                self.say(f"Good. And part {step + 1}?")

    def noted(self, *, prompt: int, cached: int, output: int, report: dict[str, Any]) -> None:
        """One answer came."""
        cache = report["cache"]
        assert cache["cached_tokens"] + cache["computed_tokens"] == cache["prompt_tokens"] == prompt
        assert cache["cached_tokens"] == cached
        self.num_requests += 1
        self.misses.append((self._before - cached, cache["miss"]))
        self.rewrites += report.get("rewrites", ())
        self.score.reusable += self._before
        self.score.reused += min(self._before, cached)
        self._before = prompt + output - 1

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.served.post(path, {"model": MODEL} | body, headers=self.headers)
        assert answer.status_code == 200, answer.text
        value: dict[str, Any] = answer.json()
        return value

    @abstractmethod
    def say(self, text: str) -> None:
        """The user says something."""

    @abstractmethod
    def results(self, ids: list[str]) -> None:
        """Tools answer."""

    @abstractmethod
    def ask(self) -> list[str]:
        """Send it all; ids of the calls that the answer makes."""

    @abstractmethod
    def side_request(self) -> None:
        """What goes beside: a title."""


class ClaudeCode(Agent):
    """Over Messages."""

    ABOUT = "You are an agent for coding. Follow the conventions of the project. "

    def system(self) -> list[dict[str, Any]]:
        billing = f"x-anthropic-billing-header: cc_version=2.1.9; cch={self.num_requests:05x};"
        env = (
            "Here is useful information about the environment you are running in:\n<env>\n"
            "Working directory: /home/a/project\nIs directory a git repo: Yes\nPlatform: linux\n"
            f"Today's date: 2026-11-{self.day}\n</env>\n"
        )
        texts = (billing, self.ABOUT * 4, env)
        return [{"type": "text", "text": text} for text in texts]

    def say(self, text: str) -> None:
        blocks = [{"type": "text", "text": text}]
        self.messages.append({"role": "user", "content": blocks})

    def results(self, ids: list[str]) -> None:
        blocks: list[dict[str, Any]] = [
            {
                "type": "tool_result",
                "tool_use_id": use,
                "content": f"def part_{use[-4:]}(): ..." * 4,
            }
            for use in ids
        ]
        if len(self.messages) % 5 == 0:  # this one stays where it was said
            blocks.append({"type": "text", "text": TODO})
        self.messages.append({"role": "user", "content": blocks})

    def ask(self) -> list[str]:
        answer = self.post(
            "/v1/messages?beta=true",
            {
                "max_tokens": 32_000,
                "system": self.system(),
                "messages": self._sent(),
                "tools": [
                    {"name": name, "description": f"{name}s. " * 9, "input_schema": {}}
                    for name in TOOL_NAMES
                ],
                "thinking": {"type": "enabled", "budget_tokens": 31_999},
                "metadata": {"user_id": f"user_1_account_2_session_{SESSION}"},
            },
        )
        usage = answer["usage"]
        cached = usage["cache_read_input_tokens"]
        prompt = usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached
        self.noted(
            prompt=prompt,
            cached=cached,
            output=usage["output_tokens"],
            report=answer["sessionkv"],
        )
        kept = [
            dict(reversed(block.items()))
            for block in answer["content"]
            if block["type"] != "thinking" or self.num_requests % 2
        ]
        self.messages.append({"role": "assistant", "content": kept})
        return [block["id"] for block in answer["content"] if block["type"] == "tool_use"]

    def _sent(self) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = json.loads(json.dumps(self.messages))
        context = (
            "<system-reminder>\nAs you answer the user's questions, you can use this context:\n"
            f"# claudeMd\nWrite tests.\n# currentDate\nToday's date is 2026-11-{self.day}.\n\n"
            "It may or may not matter here.\n</system-reminder>"
        )
        sent[0]["content"].insert(0, {"type": "text", "text": context})
        if self.plans:
            sent[-1]["content"].append({"type": "text", "text": PLAN})
        sent[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        return sent

    def side_request(self) -> None:
        title = "Please write a title for: mend the parts"
        body = {"max_tokens": 32, "messages": [{"role": "user", "content": title}]}
        self.post("/v1/messages", body)


class SubAgent(ClaudeCode):
    """One that Claude Code starts: under the same name of the conversation, with its own prompt."""

    ABOUT = "You search through files for another agent, and answer in few words. "


class OpenCode(Agent):
    """Over Chat Completions."""

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def results(self, ids: list[str]) -> None:
        for use in ids:
            text = f"def part_{use[-4:]}(): ..." * 4
            self.messages.append({"role": "tool", "tool_call_id": use, "content": text})

    def ask(self) -> list[str]:
        answer = self.post(
            "/v1/chat/completions",
            {"messages": self._sent(), "tools": self._tools(), "prompt_cache_key": "ses_1"},
        )
        usage, message = answer["usage"], answer["choices"][0]["message"]
        self.noted(
            prompt=usage["prompt_tokens"],
            cached=usage["prompt_tokens_details"]["cached_tokens"],
            output=usage["completion_tokens"],
            report=answer["sessionkv"],
        )
        message.pop("reasoning_content", None)
        for one in message.get("tool_calls", ()):
            arguments = json.loads(one["function"]["arguments"])
            one["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
        self.messages.append(message)
        return [one["id"] for one in message.get("tool_calls", ())]

    def _sent(self) -> list[dict[str, Any]]:
        env = (
            "Here is some useful information about the environment you are running in:\n<env>\n"
            "  Working directory: /home/a/project\n  Is directory a git repo: yes\n"
            f"  Platform: linux\n  Today's date: Mon Nov {self.day} 2026\n</env>\n"
        )
        sent: list[dict[str, Any]] = json.loads(json.dumps(self.messages))
        if self.plans:  # it goes along with what the user said last
            last = next(m for m in reversed(sent) if m["role"] == "user")
            parts = [last["content"], "\n" + PLAN]
            last["content"] = [{"type": "text", "text": text} for text in parts]
        about = "You are opencode, an agent that helps with code. Be brief. " * 6
        return [{"role": "system", "content": about + "\n" + env}, *sent]

    def _tools(self) -> list[dict[str, Any]]:
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": f"{name}s. " * 9,
                    "parameters": {"type": "object", "properties": {}},
                },
            }
            for name in TOOL_NAMES
        ]

    def side_request(self) -> None:
        title = {"role": "system", "content": "You are a title generator. Generate a brief title."}
        said = {"role": "user", "content": "Mend the parts."}
        self.post("/v1/chat/completions", {"messages": [title, said], "max_tokens": 20})
