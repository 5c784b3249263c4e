"""A prompt that ends in half a character."""

import pytest

from tests.builders import text as built
from tests.builders.doors import Script
from tests.builders.engine import engine_config, greedy, open_engine


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


def streamed(engine, prompt, count):
    stream = engine.stream_generate(tokens=prompt, sampling=greedy(count))
    events = list(stream)
    return [event.text for event in events if event.text], stream.result.text


def test_engine_shows_the_finished_character_and_nothing_of_the_prompt():
    head, tail = b"A prompt \xe3\x81", b"\x82 and"
    with open_engine(engine_config(), runner={"script": Script(tail, tail)}) as engine:
        deltas, whole = streamed(engine, [*head], len(tail))
        assert deltas[0] == "\u3042"
        assert "".join(deltas) == whole == "\u3042 and"
        session = engine.open("a")
        assert session.turn(tokens=[*head], sampling=greedy(len(tail))).text == "\u3042 and"
        engine.assert_ledger()


@pytest.mark.model
def test_measured_case_on_an_engine():
    runner = {"text_dir": built.smollm2_folder(), "script": Script([131])}
    with open_engine(engine_config(), runner=runner) as engine:
        prompt = [*((7 * i + 3) % 90 + 5 for i in range(6)), 10813, 230]
        deltas, whole = streamed(engine, prompt, 1)
        assert "".join(deltas) == whole
        assert len(whole) <= 1
