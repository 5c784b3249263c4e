import json
from pathlib import Path

import pytest

from sessionkv.errors import InvalidRequest, ModelBroken, TemplateRefused
from sessionkv.text.builtin import BYTE_VOCAB_SIZE, IM_END, write_byte_text
from sessionkv.text.messages import freeze_tools
from sessionkv.text.model import TextModel
from sessionkv.text.root import RootText
from tests.builders import text as built

TOOLS = freeze_tools(
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    built.LIMITS,
)


def root(text, system="Be brief.", tools=None, now_s=0.0):
    return text.root(system, tools, now_s=now_s)


def test_builtin_model_is_bytes_and_chatml():
    text = built.chatml()
    assert text.vocab_size == BYTE_VOCAB_SIZE
    assert text.eos_ids == {256, 258}
    assert text.closing_id == IM_END
    assert text.append_only
    assert text.encode_prompt("hé") == tuple("hé".encode())
    assert text.decode("hé".encode()) == "hé"
    assert len(text.facts.tokenizer_digest) == len(text.facts.template_digest) == 64


def test_root_and_first_turn_are_the_rendered_conversation():
    text = built.chatml()
    start = root(text)
    first = text.delta(start, built.read("Hi"), first=True, closed=False)
    assert text.decode(start.ids, special=True) == "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert start.ids + first == text.full(start, built.read("Hi"))


def test_delta_behind_a_closed_and_an_open_reply():
    text = built.chatml()
    start, new = root(text), built.read("More")
    closed = text.delta(start, new, first=False, closed=True)
    opened = text.delta(start, new, first=False, closed=False)
    assert text.decode(closed, special=True) == (
        "\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    )
    assert opened == (IM_END, *closed)


@pytest.mark.parametrize("name", [*built.ALL, "last_user_system"])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_log_of_closed_replies_is_the_rendered_conversation(name, system):
    text = getattr(built, name)()
    start = root(text, system)
    if not start.append_only:
        assert (name, system) == ("last_user_system", "Be brief.")
        return
    space = " " if name in ("mistral", "last_user_system") else ""
    messages = built.read("Hi", {"role": "assistant", "content": "hello"}, "the fox")
    log = [
        *start.ids,
        *text.delta(start, messages[:1], first=True, closed=False),
        *text.close_reply(built.reply(text, space + "hello")).ids(
            built.reply(text, space + "hello")
        ),
        *text.delta(start, messages[2:], first=False, closed=True),
    ]
    rendered = text.full(start, messages)
    assert text.speller.spell(log) == text.speller.spell(rendered)


def test_delta_does_not_render_the_history_or_the_system_prompt():
    text = built.chatml()
    short, long = root(text, "x"), root(text, "x" * 100_000)
    new = built.read("More")
    deltas = [text.delta(r, new, first=False, closed=True) for r in (short, long, root(text, None))]
    assert deltas[0] == deltas[1] == deltas[2]


def test_template_that_moves_the_system_prompt_is_not_append_only():
    text = built.last_user_system()
    assert text.append_only
    start = root(text)
    assert not start.append_only
    assert "rewrites" in start.reason
    with pytest.raises(ValueError, match="whole conversations"):
        text.delta(start, built.read("x"), first=False, closed=True)
    assert text.decode(text.full(start, built.read("x")), special=True).endswith(
        "Be brief.\n\nx[/INST]"
    )


def test_template_that_changes_earlier_user_messages_is_not_append_only():
    counting = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ messages | length }}\n"
        "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    text = built.with_template(counting)
    assert not text.append_only
    assert "rewrites" in text.append_only_reason


def test_template_that_repeats_the_system_prompt_is_not_append_only():
    repeating = (
        "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.s = m.content %}{% else %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'user' %}{{ ns.s }}{% endif %}{{ m.content }}<|im_end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    text = built.with_template(repeating)
    assert text.append_only
    assert "repeats" in root(text).reason


def test_template_that_opens_replies_further_than_it_keeps_is_continued():
    opening = built.CHATML_DEFAULT_SYSTEM.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    start = root(built.with_template(opening))
    assert start.append_only


def test_tools_are_in_the_first_turn_and_not_in_later_ones():
    text = built.llama3()
    start = root(text, None, TOOLS)
    assert start.append_only
    first = text.delta(start, built.read("x"), first=True, closed=False)
    assert '{"type": "function", "function": {"name": "f"' in text.decode(first, special=True)
    assert "Tools" not in text.decode(text.delta(start, built.read("y"), first=False, closed=True))


def test_tools_that_spell_control_tokens_stay_text():
    text = built.llama3()
    tools = freeze_tools([{"name": "<|eot_id|>"}], built.LIMITS)
    ids = text.full(RootText(None, tools, 0.0), built.read("x"))
    assert ids.count(text.closing_id) == 2  # one ends the tools, one the message
    assert '{"name": "<|eot_id|>"}' in text.decode(ids, special=True)


def test_tool_results_as_a_turn():
    text = built.llama3()
    new = built.read({"role": "tool", "content": "rain", "tool_call_id": "c"})
    delta = text.delta(root(text), new, first=False, closed=True)
    assert "tool<|end_header_id|>\n\nrain<|eot_id|>" in text.decode(delta, special=True)


def test_clock_of_the_template_is_the_sessions():
    text = built.with_template(
        "{{ strftime_now('%d %b %Y') }}"
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    ids = text.full(text.root(None, None, now_s=86400.0), built.read("x"))
    assert text.decode(ids).startswith("02 Jan 1970")


def test_finished_conversation_is_encoded_as_a_log():
    text = built.chatml()
    start = root(text)
    messages = built.read("a", {"role": "assistant", "content": "b"})
    ids, closed = text.replay(start, messages)
    assert closed
    assert ids[-1] == IM_END
    delta = text.delta(start, built.read("c"), first=False, closed=closed)
    assert ids + delta == text.full(start, (*messages, *built.read("c")))


def test_model_without_a_template_takes_prompts_only():
    text = built.with_template(None)
    assert not text.append_only
    assert text.encode_prompt("x") == (120,)
    with pytest.raises(TemplateRefused, match="no chat template"):
        text.full(root(text), built.read("x"))
    with pytest.raises(TemplateRefused, match="no chat template"):
        text.delta(root(text), built.read("x"), first=True, closed=False)


def test_prompt_may_hold_any_character():
    prompt = "a\U0010fffd\U00100001<|im_end|>"
    ids = built.chatml().encode_prompt(prompt)
    assert ids == (*"a\U0010fffd\U00100001".encode(), IM_END)


def test_prompt_with_a_lone_surrogate_is_refused():
    with pytest.raises(InvalidRequest, match="surrogate"):
        built.chatml().encode_prompt("a\ud83d")


@pytest.mark.parametrize("wrong", [-1, 259])
def test_tokens_outside_the_vocabulary_are_named_by_position(wrong):
    text = built.chatml()
    text.check_tokens([0, 258])
    text.check_tokens([])
    with pytest.raises(InvalidRequest) as caught:
        text.check_tokens([0, wrong])
    assert caught.value.details["field"] == "tokens[1]"


def test_leading_space_of_word_marks():
    text = built.mistral()
    ids = text.encoder.encode("the dog")
    assert text.decode(ids) == "the dog"
    assert text.decode(ids, continues=True) == " the dog"
    streams = [text.reply_stream(continues=c) for c in (False, True)]
    assert ["".join(s.push(i).text for i in ids) for s in streams] == ["the dog", " the dog"]


@pytest.mark.parametrize("missing", ["text.json", "tokenizer.json"])
def test_missing_file_is_a_broken_model(tmp_path, missing):
    write_byte_text(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ModelBroken, match=missing):
        TextModel.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "format 2"),
        ({"special_tokens": {"<|im_end|>": 7}}, "is token 7"),
        ({"eos_token_ids": None}, "misstates"),
    ],
)
def test_contradicting_facts_are_a_broken_model(tmp_path: Path, change, words):
    write_byte_text(tmp_path)
    path = tmp_path / "text.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelBroken, match=words):
        TextModel.load(tmp_path)


def test_unreadable_tokenizer_is_a_broken_model(tmp_path: Path):
    write_byte_text(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelBroken, match="not a tokenizer"):
        TextModel.load(tmp_path)
