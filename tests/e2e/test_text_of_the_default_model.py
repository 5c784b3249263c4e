"""Text of the default model against what transformers makes of it."""

import pytest
from transformers import PreTrainedTokenizerFast

from sessionkv.config import DEFAULT_MODEL, user_cache_dir
from sessionkv.model.prepare import prepare_model
from sessionkv.text.root import RootText
from tests.builders import text as built

CONVERSATIONS = (
    [{"role": "user", "content": "Name three primary colours."}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 1234 é\n\n\u3042 "}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "x" * 50},
    ],
)


@pytest.mark.model
def test_rendered_ids_are_transformers():
    text = built.smollm2()
    folder = prepare_model(DEFAULT_MODEL, cache_dir=user_cache_dir()).text_dir
    reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    reference.chat_template = (folder / "chat_template.jinja").read_text()
    for messages in CONVERSATIONS:
        expected = reference.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        ids = text.full(RootText(None, None, 0.0), built.read(*messages))
        assert list(ids) == expected


@pytest.mark.model
def test_session_log_is_the_rendered_conversation():
    text = built.smollm2()
    messages = built.read(*CONVERSATIONS[2])
    root = text.root(None, None, now_s=0.0)
    sampled = built.reply(text, "Hello!")
    log = [
        *root.ids,
        *text.delta(root, messages[:1], first=True, closed=False),
        *text.close_reply(sampled).ids(sampled),
        *text.delta(root, messages[2:], first=False, closed=True),
    ]
    assert tuple(log) == text.full(root, messages)
    assert text.closing_id == 2
    assert not text.renderer.habits.null_content
