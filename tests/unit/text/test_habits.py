import pytest

from sessionkv.text.messages import Message, ToolCall
from tests.builders import text as built

CALLING = (
    "{% for m in messages %}{{ m.role }}:{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "%s"
    "{% endfor %}{% else %}{{ m.content }}{% endif %};{% endfor %}"
)
MAPS = CALLING.replace(
    "%s", "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }},{% endfor %}"
)
TEXT = CALLING.replace("%s", "{{ '<' + c.function.arguments + '>' }}")
PRINTED = CALLING.replace("%s", "<{{ c.function.arguments }}>")
BOTH = CALLING.replace(
    "%s",
    "{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}",
)


def habits(template):
    return built.with_template(template).renderer.habits


def test_plain_chatml():
    found = built.chatml().renderer.habits
    assert not found.folds_system
    assert found.closing == found.closing_token == "<|im_end|>"
    assert found.opening == "<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "maps"), [(MAPS, True), (TEXT, False), (PRINTED, False), (BOTH, True)]
)
def test_how_tool_arguments_are_taken(template, maps):
    assert habits(template).map_arguments is maps


def test_content_may_be_absent_where_the_template_can_tell():
    kinder = (
        "{% for m in messages %}{% if m.content is not none %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    printing = "{% for m in messages %}{{ m.content }}{% endfor %}"
    adding = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    assert [habits(t).null_content for t in (kinder, printing, adding)] == [True, False, False]


def test_absent_content_renders_as_nothing_where_it_must():
    text = built.with_template("{% for m in messages %}[{{ m.role + m.content }}]{% endfor %}")
    messages = (Message("user", "x"), Message("assistant", None, tool_calls=(ToolCall("f", "{}"),)))
    assert text.renderer.render(messages) == "[userx][assistant]"


def test_system_is_folded_where_it_is_refused_or_ignored():
    assert built.gemma().renderer.habits.folds_system
    ignoring = "{% for m in messages if m.role != 'system' %}{{ m.content }};{% endfor %}"
    text = built.with_template(ignoring)
    assert text.renderer.habits.folds_system
    assert text.renderer.render(built.read({"role": "system", "content": "S"}, "U")) == "S\n\nU;"


STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}"
)
DEAF = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "{{ m.role }}:{{ m.content }};{% endif %}{% endfor %}"
)
TURNS = ("A", {"role": "system", "content": "S"}, {"role": "assistant", "content": "R"})


@pytest.mark.parametrize("template", [STRICT, DEAF])
def test_a_later_system_message_is_the_users_where_it_is_refused_or_ignored(template):
    text = built.with_template(template)
    assert (text.renderer.habits.folds_later_system, text.renderer.habits.joins_users) == (
        True,
        False,
    )
    first = {"role": "system", "content": "F"}
    assert text.renderer.render(built.read(first, *TURNS, "B")) == (
        "system:F;user:A;user:S;assistant:R;user:B;"
    )


def test_messages_of_the_user_in_a_row_are_one_where_they_are_refused():
    text = built.gemma()
    assert text.renderer.habits.joins_users
    before, after = (text.renderer.render(built.read(*TURNS[:n], "B", "C")) for n in (2, 3))
    assert "A\n\nS\n\nB\n\nC" in before
    assert "A\n\nS<" in after
    assert "B\n\nC<" in after


@pytest.mark.parametrize("text", [built.chatml, built.llama3])
def test_system_messages_stay_where_the_template_takes_them(text):
    habits = text().renderer.habits
    assert (habits.folds_later_system, habits.joins_users) == (False, False)


def test_closing_includes_the_space_before_its_token():
    spaced = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% if m.role == 'assistant' %} <|endoftext|>{% endif %}{% endfor %}"
    )
    text = built.with_template(spaced)
    assert text.renderer.habits.closing == " <|endoftext|>"
    assert text.closing_id == 256


def test_template_without_an_end_of_turn():
    assert (
        built.with_template("{% for m in messages %}{{ m.content }};{% endfor %}").closing_id
        is None
    )


def test_opening_is_what_all_replies_have_in_common():
    assert built.mistral().renderer.habits.opening == " [/INST]"


def test_template_that_refuses_everything_has_default_habits():
    found = habits("{{ raise_exception('no') }}")
    assert (found.closing, found.opening, found.folds_system) == ("", "", False)


def test_what_a_reply_shows_of_a_tool_call():
    assert built.llama3().renderer.habits.calling == '{"name": "'
    assert built.llama3().calls_tool('Let me see. {"name": "look", "parameters": {}}')
    assert not built.llama3().calls_tool('{"city": "Oslo"}')
    assert built.chatml().renderer.habits.calling == ""
    assert not built.chatml().calls_tool('{"name": "look"}')
    tags = CALLING.replace("%s", "<tool_call>{{ c.function.name }}")
    assert habits(tags + "{% if add_generation_prompt %}assistant:{% endif %}").calling == (
        "<tool_call>"
    )
    short = CALLING.replace("%s", "[{{ c.function.name }}")
    assert habits(short + "{% if add_generation_prompt %}assistant:{% endif %}").calling == ""


def test_control_tokens_around_a_call_are_not_shown():
    named = CALLING.replace("%s", "<|im_start|>call: {{ c.function.name }}<|im_end|>")
    found = habits(named + "{% if add_generation_prompt %}assistant:{% endif %}")
    assert found.calling == "call:"
