"""How a model writes tool calls and reasoning, read from templates like those of real models."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from sessionkv.types.reply_style import ReplyStyle
from tests.builders import text as built

TURN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
END = "{{ '<|im_end|>\n' }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n%s' }}{% endif %}"
CALLS = (
    "{% if m.tool_calls %}{% for c in m.tool_calls %}%s{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}"
)
OBJECT = (
    """{{ '%s"name": "' + c.function.name + '", "%s": ' }}"""
    "{{ c.function.arguments | tojson }}{{ '}%s' }}"
)
HERMES = OBJECT % ("<tool_call>\n{", "arguments", "\n</tool_call>")
LLAMA3 = OBJECT % ('<|python_tag|>{"type": "function", ', "parameters", "")
MISTRAL = OBJECT % ("[TOOL_CALLS] [{", "arguments", "]")
LAST = (
    "{{ '<tool_call>\n{ \"arguments\": ' }}{{ c.function.arguments | tojson }}"
    """{{ ', "name": "' + c.function.name + '"}\n</tool_call>' }}"""
)
LISTED = OBJECT % ("<|tool_call|>[{", "arguments", "]")
NAMED = "{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' }}{{ c.function.arguments | tojson }}"
OTHER = "{{ '<tool_call>\n<function=' + c.function.name + '>' }}"


def style(calls: str, opening: str = "", reasoning: str = "") -> ReplyStyle:
    template = TURN + CALLS.replace("%s", calls) + reasoning + END + PROMPT.replace("%s", opening)
    return built.with_template(template).reply_style


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (HERMES, "hermes"),
        (LLAMA3, "llama3"),
        (MISTRAL, "mistral"),
        (NAMED, "mistral"),
        (LAST, "hermes"),
        (LISTED, None),
        (OTHER, "qwen3_coder"),
        ("", None),
    ],
)
def test_calls(calls: str, expected: str | None) -> None:
    assert style(calls) == ReplyStyle(expected)


def test_a_template_that_takes_one_call_only() -> None:
    strict = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}" + LLAMA3
    assert style(strict) == ReplyStyle("llama3", single_call=True)


def test_reasoning() -> None:
    think = ("<think>", "</think>")
    assert style("", reasoning="{# </think> #}") == ReplyStyle(None, think)
    assert style("", "<think>\n", "{# </think> #}") == ReplyStyle(None, think, True)
    opened = style(HERMES, "<think>\n", "{# </think> #}")  # calls are shown without it
    assert opened == ReplyStyle("hermes", think, True)
    assert style(HERMES, reasoning="{# [/THINK] #}").reasoning == ("[THINK]", "[/THINK]")


def test_templates_without_any() -> None:
    assert built.chatml().reply_style == ReplyStyle()
    assert built.with_template(None).reply_style == ReplyStyle()
    assert built.llama3().reply_style == ReplyStyle("llama3")


def test_marks_are_shown_though_they_are_control_tokens() -> None:
    tokenizer = built.byte_level(("<|im_start|>", "<|im_end|>"))
    marks = [AddedToken(s, special=True) for s in ("[TOOL_CALLS]", "[ARGS]", "[INST]")]
    tokenizer.add_special_tokens(marks)
    template = TURN + CALLS.replace("%s", NAMED) + END + PROMPT.replace("%s", "")
    text = built.build(tokenizer, template, bos=None, eos=("<|im_end|>",))
    ids = text.encoder.encode("[TOOL_CALLS]f[ARGS]{}[INST]<|im_end|>")
    assert text.decode(ids) == "[TOOL_CALLS]f[ARGS]{}"
    assert text.calls_tool("[TOOL_CALLS]f[ARGS]{}")
    assert not text.calls_tool("f{}")


def test_over_the_wire_and_back() -> None:
    for found in (ReplyStyle(), ReplyStyle("hermes", ("<think>", "</think>"), True, True)):
        assert ReplyStyle.from_map(found.to_map()) == found
    assert ReplyStyle.from_map({}) == ReplyStyle()
    assert ReplyStyle.from_map({"tool_calls": "new", "starts_in_reasoning": True}) == ReplyStyle()
