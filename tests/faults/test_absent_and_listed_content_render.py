"""Content that is null or a list of parts."""

import pytest

from sessionkv.errors import InvalidRequest
from sessionkv.text.messages import normalise
from sessionkv.text.root import RootText
from tests.builders import text as built
from tests.builders.engine import GREEDY, engine_config, open_engine

ROOT = RootText(None, None, 0.0)
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "rain"}


@pytest.mark.parametrize("calling", [{"content": None}, {}])
def test_call_without_content_is_rendered(calling):
    text = built.llama3()
    ids = text.full(ROOT, built.read("w", calling | {"role": "assistant", "tool_calls": [CALL]},
                                     RESULT, "and?"))  # fmt: skip
    shown = text.decode(ids, special=True)
    assert '{"name": "look", "parameters": {"a": 1}}<|eot_id|>' in shown
    assert "None" not in shown


@pytest.mark.parametrize("name", ["chatml", "chatml_words"])
def test_template_that_cannot_take_null_gets_nothing(name):
    text = built.ALL[name]()
    items = ("w", {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT)
    shown = text.decode(text.full(ROOT, built.read(*items)), special=True)
    assert "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\nrain<|im_end|>" in shown


def test_text_parts_are_one_text():
    text = built.chatml()
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    listed = text.full(ROOT, built.read({"role": "user", "content": parts}))
    assert listed == text.full(ROOT, built.read("AB"))


def test_empty_list_of_messages_and_images_are_refused():
    with pytest.raises(InvalidRequest, match="at least one"):
        normalise([], built.LIMITS)
    with pytest.raises(InvalidRequest, match="not supported"):
        built.read({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})


@pytest.mark.parametrize("calling", [{"content": None}, {}])
def test_engine_takes_calls_without_content(tmp_path, calling):
    text, folder = built.llama3(), built.write_folder("llama3", tmp_path)
    with open_engine(engine_config(blocks=512), runner={"text_dir": folder}) as engine:
        messages = [
            {"role": "user", "content": "w"},
            {"role": "assistant", "tool_calls": [CALL], **calling},
            RESULT,
            {"role": "user", "content": "and?"},
        ]
        whole = engine.generate(messages=messages, sampling=GREEDY)
        assert whole.usage.prompt_tokens == len(text.full(ROOT, built.read(*messages)))
        session = engine.open("a")
        first = session.turn("w", sampling=GREEDY)
        second = session.turn(messages=[RESULT, messages[-1]], sampling=GREEDY)
        assert second.usage.prompt_tokens > first.usage.prompt_tokens + len(first.tokens)
        engine.assert_ledger()


def test_engine_refuses_no_messages_and_images_and_joins_parts():
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    with open_engine(engine_config(blocks=256)) as engine:
        session = engine.open("a")
        for run in (session.turn, engine.generate):
            with pytest.raises(InvalidRequest, match="at least one"):
                run(messages=[])
            with pytest.raises(InvalidRequest) as caught:
                run(messages=[image])
            assert caught.value.details["field"].startswith("messages[0].content[0]")
        listed = engine.generate(messages=[{"role": "user", "content": parts}], sampling=GREEDY)
        assert session.turn("AB", sampling=GREEDY).tokens == listed.tokens
        engine.assert_ledger()
