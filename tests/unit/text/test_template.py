import pytest

from sessionkv.errors import ModelBroken, TemplateRefused
from sessionkv.text.template import ChatTemplate


def render(source, messages=(), tools=None, *, now_s=0.0, generation=False):
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    return template.render(list(messages), tools, now_s=now_s, generation=generation)


def test_whitespace_settings_are_those_templates_are_written_for():
    assert render("{% if true %}\n  {% if true %}\nx{% endif %}\n{% endif %}y") == "xy"


def test_words_and_generation_prompt():
    source = "{{ bos_token }}{% if add_generation_prompt %}go{% endif %}{{ eos_token }}"
    assert render(source, generation=True) == "<s>go</s>"
    assert render(source) == "<s></s>"


def test_tojson_keeps_order_and_characters():
    tool = {"b": "é<&>", "a": [1, None]}
    assert render("{{ tools[0] | tojson }}", tools=[tool]) == '{"b": "é<&>", "a": [1, null]}'
    assert render("{{ tools[0] | tojson(indent=1) }}", tools=[{"b": 1}]) == '{\n "b": 1\n}'


def test_tojson_in_ascii_leaves_marks_alone():
    source = "{{ tools[0] | tojson(ensure_ascii=True) }}"
    tool = ["é\U0001f600", "\U0010fffd\U00100001"]
    assert render(source, tools=[tool]) == '["\\u00e9\\ud83d\\ude00", "\U0010fffd\U00100001"]'


def test_clock_stands_still():
    source = "{{ strftime_now('%d %b %Y %H:%M') }}"
    assert render(source, now_s=86400.0) == "02 Jan 1970 00:00"


def test_loop_controls_and_generation_tag():
    source = "{% for m in messages %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}"
    assert render(source, [1, 2, 3]) == "1"
    assert render("a{% generation %}b{{ 1 }}{% endgeneration %}c") == "ab1c"


def test_the_templates_own_words_reach_the_caller():
    with pytest.raises(TemplateRefused, match="only nice roles") as caught:
        render("{{ raise_exception('only nice roles') }}")
    assert caught.value.code == "template_refused"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 'x' }}",
        "{{ 'a' + 1 }}",
        "{{ 1 // 0 }}",
        "{{ [] | random }}{{ missing.x }}",
        "{{ 'x'.nothing() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% set _ = tools.append(1) %}",
    ],
)
def test_whatever_goes_wrong_in_a_template_is_a_refusal(source):
    with pytest.raises(TemplateRefused):
        render(source, tools=[{}])


def test_a_template_that_cannot_be_read_is_a_broken_model():
    with pytest.raises(ModelBroken, match="template"):
        render("{% for %}")
