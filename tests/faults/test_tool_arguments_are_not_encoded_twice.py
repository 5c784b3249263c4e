"""Tool arguments come as JSON text; templates want a map, or text."""

import pytest

from sessionkv.errors import TemplateRefused
from sessionkv.text.root import RootText
from tests.builders import text as built
from tests.builders.engine import GREEDY, engine_config, open_engine
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


@pytest.mark.parametrize("template", [MAPS, TEXT, BOTH])
def test_engine_reuses_histories_with_calls_however_they_are_written(tmp_path, template):
    folder = built.write_words(tmp_path, template)

    def call(arguments):
        return {"type": "function", "function": {"name": "look", "arguments": arguments}}

    with open_engine(engine_config(blocks=512), runner={"text_dir": folder}) as engine:
        history = [{"role": "user", "content": "w"},
                   {"role": "assistant", "content": None, "tool_calls": [call(OSLO)]},
                   {"role": "tool", "content": "rain"}]  # fmt: skip
        first = engine.generate(messages=history, sampling=GREEDY)
        again = engine.generate(messages=history, sampling=GREEDY)
        assert again.tokens == first.tokens
        assert again.cache.computed_tokens == 1
        broken = [*history[:1], {**history[1], "tool_calls": [call('{"a":')]}, *history[2:]]
        if template == MAPS:
            with pytest.raises(TemplateRefused):
                engine.generate(messages=broken)
        else:
            assert engine.generate(messages=broken, sampling=GREEDY).tokens
        assert engine.generate(messages=history, sampling=GREEDY).tokens == first.tokens
        engine.assert_ledger()
