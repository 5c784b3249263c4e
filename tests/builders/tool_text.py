"""A text folder of one token a byte whose template writes tools and calls as Hermes models do."""

from __future__ import annotations

import json
from pathlib import Path

from sessionkv.text.builtin import write_byte_text

TEMPLATE = (
    "{%- set system = messages[0].content if messages[0].role == 'system' else none %}"
    "{%- if tools %}{{- '<|im_start|>system\n' }}{%- if system %}{{- system + '\n' }}{%- endif %}"
    "{{- '<tools>' }}{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}"
    "{{- '\n</tools><|im_end|>\n' }}"
    "{%- elif system %}{{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'system' and loop.first %}"
    "{%- elif message.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + message.content }}"
    "{{- '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content %}{{- message.content }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def write_tool_text(folder: Path) -> Path:
    """Write it into a folder, which is made where it is missing; returns the folder."""
    write_byte_text(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def written_call(name: str, **arguments: object) -> str:
    """A call as the model is to write it."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"
