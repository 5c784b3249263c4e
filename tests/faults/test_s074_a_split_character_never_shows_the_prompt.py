"""A prompt that ends in half a character."""

import pytest

from tests.builders import text as built


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral"])
def test_reply_finishes_the_character_and_shows_no_prompt(name):
    text = built.ALL[name]()
    byte_ids = [next(i for i in range(text.vocab_size) if shown(text, i) == bytes([b]))
                for b in "\u3042".encode()]  # fmt: skip
    prompt = [*text.encoder.encode("the fox"), *byte_ids[:2]]
    stream = text.reply_stream(continues=True, prompt=prompt)
    assert stream.push(byte_ids[2]).text == "\u3042"


def shown(text, token_id):
    return text._vocabulary.visible[token_id]


def test_reply_that_does_not_finish_it_shows_its_own_text():
    text = built.chatml()
    stream = text.reply_stream(continues=True, prompt=[65, 0xE3, 0x81])
    assert "A" not in "".join(stream.push(i).text for i in b"xy")


@pytest.mark.model
def test_measured_case_of_the_default_model():
    prompt = [*((7 * i + 3) % 90 + 5 for i in range(6)), 10813, 230]
    stream = built.smollm2().reply_stream(continues=True, prompt=prompt)
    text = stream.push(131).text + stream.finish().text
    assert len(text) <= 1
