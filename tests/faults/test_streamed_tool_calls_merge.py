"""Streamed calls without an index or an id of their own, which clients take for one."""

from __future__ import annotations

import json
from pathlib import Path

import openai

from tests.builders.engine import engine_config
from tests.builders.gateway import MODEL, http_engine, replies, tools_folder

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
SAID = (
    '<tool_call>\n{"name": "f", "arguments": {"x":1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {"y":2}}\n</tool_call>'
)


def test_two_streamed_calls_stay_two(tmp_path: Path) -> None:
    runner = {"text_dir": tools_folder(tmp_path), "script": replies(SAID)}
    with (
        http_engine(engine_config(blocks=512), runner=runner) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client,
    ):
        deltas = []
        with client.chat.completions.stream(
            model=MODEL, messages=[{"role": "user", "content": "Go"}], tools=TOOLS
        ) as stream:
            for event in stream:
                if event.type == "chunk" and event.chunk.choices:
                    deltas += event.chunk.choices[0].delta.tool_calls or []
            message = stream.get_final_completion().choices[0].message
    first = {}
    for delta in deltas:
        first.setdefault(delta.index, delta)
    assert [(first[i].function.name, bool(first[i].id)) for i in (0, 1)] == [
        ("f", True),
        ("g", True),
    ]
    assert len({call.id for call in message.tool_calls}) == 2
    assert [json.loads(c.function.arguments) for c in message.tool_calls] == [{"x": 1}, {"y": 2}]
