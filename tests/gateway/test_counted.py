"""What ``count_tokens`` says is what the same request's answer is billed, whatever was kept."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
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
