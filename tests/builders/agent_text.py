"""Bytes under a template as agents' models have: tools, calls as Hermes writes them, reasoning."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from sessionkv.text.builtin import byte_text

TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{%- endif %}"
    "{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}{{ '<|im_end|>\n' }}"
    "{%- endif %}"
    "{%- for m in messages %}"
    "{%- if not (tools and loop.first and m.role == 'system') %}"
    "{%- if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}"
    "{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and m.reasoning_content %}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{%- endif %}"
    "{{ m.content or '' }}"
    "{%- for call in m.tool_calls or [] %}"
    "{%- if not loop.first or m.content %}{{ '\n' }}{%- endif %}"
    """{{ '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}"""
    "{{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}"
    "{%- endfor %}{{ '<|im_end|>\n' }}"
    "{%- endif %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)

_OBJECT = TEMPLATE[
    TEMPLATE.index("{{ '<tool_call>") : TEMPLATE.rindex("{%- endfor %}{{ '<|im_end|>")
]
TAGGED_TEMPLATE = TEMPLATE.replace(
    _OBJECT,
    "{{ '<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{%- for key, value in call.function.arguments | items %}{{ '<parameter=' + key + '>\n' }}"
    "{{- value | tojson if value is mapping or (value is sequence and value is not string)"
    " else value | string }}{{ '\n</parameter>\n' }}{%- endfor %}"
    "{{ '</function>\n</tool_call>' }}",
)
"""The same with calls as Qwen3-Coder writes them, where values have Python's spelling."""


def write_agent_text(folder: Path, *, template: str = TEMPLATE) -> Path:
    """The text folder of such a model; returns the folder."""
    files = replace(byte_text(), template=template)
    facts = json.loads(files.facts)
    files = replace(files, facts=json.dumps(facts | {"template_digest": f"agent{len(template)}"}))
    files.write(folder)
    return folder


def call(name: str, arguments: str) -> str:
    """A call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def tagged_call(name: str, **values: str) -> str:
    """A call as a model of :data:`TAGGED_TEMPLATE` writes it."""
    parts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"
