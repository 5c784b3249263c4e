"""What ``count_tokens`` says is what the same request's answer is billed, whatever was kept."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sessionkv.text.builtin import IM_END
from tests.builders.agent_text import call, write_agent_text
from tests.builders.engine import engine_config
from tests.builders.gateway import HEAD, MODEL, HttpEngine, http_engine, tools_folder

TOOLS = [
    {"name": name, "input_schema": {"type": "object", "properties": {"n": {"type": "integer"}}}}
    for name in ("look", "see")
]
WORDS = [
    "a",
    "the ",
    "\n",
    " ",
    "é",
    "\u3042",
    "\U0001f600",
    "e\u0301",
    "<think>",
    "<|im_end|>",
    "{",
]
OPENING = [257, *HEAD, 10]


class Said:
    """A runner's script: every answer says the same bytes, until it is told others."""

    def __init__(self) -> None:
        self.reply = b""

    def __call__(self, ids: Sequence[int]) -> int:
        size = len(OPENING)
        start = next(i for i in range(len(ids), 0, -1) if list(ids[i - size : i]) == OPENING)
        said = len(ids) - start
        return self.reply[said] if said < len(self.reply) else IM_END


class Talk:
    """A client that sends everything each time, and not quite as it got it."""

    def __init__(self, served: HttpEngine, said: Said, seed: int) -> None:
        self.served = served
        self.said = said
        self.rng = random.Random(seed)
        self.tools = TOOLS[:1]
        self.messages: list[dict[str, Any]] = []
        self.num_put_back = 0

    def words(self) -> str:
        return "".join(self.rng.choices(WORDS, k=self.rng.randrange(1, 12))).strip() or "x"

    def reply(self) -> bytes:
        rng = self.rng
        thought = f"<think>\n{self.words()}\n</think>\n\n" if rng.random() < 0.6 else ""
        text = self.words().encode()
        if rng.random() < 0.3:  # bytes that are no text are other tokens when they are sent back
            text += bytes(rng.choices(range(0x80, 0x100), k=2))
        calls = [call("look", f'{{"n":{rng.randrange(99)}}}') for _ in range(rng.randrange(2))]
        return thought.encode() + text + "".join("\n" + item for item in calls).encode()

    def turn(self) -> None:
        rng = self.rng
        last = self.messages[-1]["content"] if self.messages else []
        uses = [block["id"] for block in last if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use, "content": "5"} for use in uses]
        asked = results or [{"type": "text", "text": self.words()}]
        self.messages.append({"role": "user", "content": asked})
        if rng.random() < 0.1:
            self.tools = rng.choice((TOOLS[:1], TOOLS))
        self.said.reply = self.reply()
        body = {"model": MODEL, "messages": self.messages, "tools": self.tools}
        counted = self.served.post("/v1/messages/count_tokens", body).json()["input_tokens"]
        thinking = {"type": "adaptive"} if rng.random() < 0.7 else None
        fields = {"max_tokens": 90, "thinking": thinking}
        answer = self.served.post("/v1/messages", body | fields).json()
        usage = answer["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
        plain = {"x-sessionkv-helper": "true"}
        alone = self.served.post("/v1/messages/count_tokens", body, headers=plain).json()
        self.num_put_back += alone["input_tokens"] != counted
        self.messages.append({"role": "assistant", "content": answer["content"] or [EMPTY]})
        self.change()

    def change(self) -> None:
        """What clients do to a history."""
        rng = self.rng
        content = self.messages[-1]["content"]
        if rng.random() < 0.5:
            content = [block for block in content if block["type"] != "thinking"] or [EMPTY]
        content = json.loads(json.dumps(content))
        for block in content:
            if block["type"] == "text" and rng.random() < 0.3:
                block["text"] = f"\n{block['text']} "
        self.messages[-1]["content"] = content
        if rng.random() < 0.1 and len(self.messages) > 2:
            del self.messages[-2:]  # asks something else instead
        elif rng.random() < 0.1:
            self.messages[0]["content"] = [{"type": "text", "text": self.words()}]


EMPTY = {"type": "text", "text": "."}


@pytest.mark.parametrize("folder", [write_agent_text, tools_folder])
def test_counted_is_what_is_billed(tmp_path: Path, folder: Any) -> None:
    said = Said()
    runner = {"text_dir": folder(tmp_path), "script": said}
    with http_engine(engine_config(blocks=8192), runner=runner) as served:
        talks = [Talk(served, said, seed) for seed in range(4)]
        for _ in range(5):
            for talk in talks:
                talk.turn()
        assert sum(talk.num_put_back for talk in talks) > 0


STEADY = {"x-sessionkv-steady": "true"}
NAMED = {"x-session-id": "a"}
DATED = "You help.\n<env>\n  Today's date: Mon Nov 30 2026\n</env>\n"
ASKS = DATED.replace("You help.", "Generate a title for this conversation.")
USER_ID = {"user_id": "user_0_session_0b2a5c1e-1b0f-4a53-9d3e-0a1b2c3d4e5f"}


@pytest.fixture(scope="module")
def said() -> Said:
    return Said()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, said: Said) -> Iterator[HttpEngine]:
    folder = tools_folder(tmp_path_factory.mktemp("text"))
    runner = {"text_dir": folder, "script": said}
    with http_engine(engine_config(blocks=8192), runner=runner) as engine:
        yield engine


def billed_and_counted(
    served: HttpEngine, body: dict[str, Any], headers: dict[str, str], *, max_tokens: int = 600
) -> tuple[int, int, list[Any]]:
    """Of one request, counted before it is run, and the answer's content."""
    body = {"model": MODEL, **body}
    counted = served.post("/v1/messages/count_tokens", body, headers=headers).json()["input_tokens"]
    answer = served.post("/v1/messages", {**body, "max_tokens": max_tokens}, headers=headers).json()
    usage = answer["usage"]
    return usage["input_tokens"] + usage["cache_read_input_tokens"], counted, answer["content"]


@pytest.mark.parametrize(
    ("headers", "fields"),
    [(NAMED, {}), (NAMED | STEADY, {}), ({}, {"metadata": USER_ID}), (STEADY, {})],
)
def test_a_named_conversation_is_counted_as_it_is_found(
    served: HttpEngine, said: Said, headers: dict[str, str], fields: dict[str, Any]
) -> None:
    first = f"Hi {headers} {fields}"
    messages: list[Any] = [{"role": "user", "content": first}]
    for turn in range(4):
        said.reply = b"ok \xe9\xff %d" % turn  # not the tokens of its text
        if turn == 2:  # the conversation is known by its name alone
            messages[0] = {"role": "user", "content": first + ", edited"}
        system = DATED.replace("Nov 30", f"Nov 3{turn}")
        body = {"system": system, "messages": messages, **fields}
        billed, counted, content = billed_and_counted(served, body, headers)
        assert counted == billed
        messages.append({"role": "assistant", "content": content})
        messages.append({"role": "user", "content": "And?"})


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({"system": ASKS}, 600),
        ({"system": ASKS}, 64),
        ({"system": DATED, "metadata": {"sessionkv_helper": True}}, 600),
        ({"system": ASKS, "metadata": {"sessionkv_helper": "false"}}, 64),
        ({"system": DATED + "Suggest a title."}, 600),
        ({"system": DATED + "Suggest a title.", "max_tokens": 64}, 64),
    ],
)
def test_a_helpers_request_is_counted_as_one(
    served: HttpEngine, fields: dict[str, Any], max_tokens: int
) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    billed, counted, _ = billed_and_counted(served, body, STEADY, max_tokens=max_tokens)
    assert counted == billed
