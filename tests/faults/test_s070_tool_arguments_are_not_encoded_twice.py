"""Tool arguments come as JSON text; templates want a map, or text."""

import pytest

from sessionkv.errors import TemplateRefused
from sessionkv.text.root import RootText
from tests.builders import text as built
from tests.unit.text.test_habits import BOTH, MAPS, TEXT

ROOT = RootText(None, None, 0.0)
OSLO = '{"city":"Oslo","n":2}'


def shown(template, arguments):
    text = built.with_template(template)
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = built.read("w", {"role": "assistant", "content": None, "tool_calls": [call]}, "x")
    return text.decode(text.full(ROOT, messages))


def test_template_of_maps():
    assert shown(MAPS, OSLO) == "user:w;assistant:city=Oslo,n=2,;user:x;"


def test_template_of_text():
    assert shown(TEXT, OSLO) == f"user:w;assistant:<{OSLO}>;user:x;"


@pytest.mark.parametrize("arguments", [OSLO, {"city": "Oslo", "n": 2}])
def test_no_quotes_of_quotes(arguments):
    assert shown(BOTH, arguments) == 'user:w;assistant:{"city": "Oslo", "n": 2};user:x;'


@pytest.mark.parametrize("template", [TEXT, BOTH])
def test_malformed_arguments_stay_text(template):
    assert '{"a":' in shown(template, '{"a":')


def test_malformed_arguments_a_template_cannot_take_are_its_refusal():
    with pytest.raises(TemplateRefused):
        shown(MAPS, '{"a":')
