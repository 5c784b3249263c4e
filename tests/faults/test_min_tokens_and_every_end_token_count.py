"""Stops before min_tokens do not count; each of several end tokens ends a turn."""

import pytest

from sessionkv import FinishReason, SamplingParams
from tests.builders import text as built
from tests.builders.doors import Script
from tests.builders.engine import engine_config, greedy, open_engine


def test_stop_string_before_min_tokens_is_text():
    text = built.chatml()
    sampled = b"aXbcdefXg"
    stream = text.reply_stream(["X"], min_tokens=6)
    for token_id in sampled:
        stream.push(token_id)
    assert stream.text == "aXbcdef"
    assert stream.stop.start == 7
    ending = text.cut_at_stop(sampled, stream.stop.start)
    assert (ending.keep_n, ending.replacement_ids) == (7, ())


@pytest.mark.parametrize("end", [258, 256])
def test_either_end_token_closes_and_neither_is_text(end):
    text = built.chatml()
    stream = text.reply_stream()
    assert "".join(stream.push(i).text for i in (*b"ok", end)) == "ok"
    ending = text.close_reply((*b"ok", end))
    assert ending.closed
    assert ending.ids((*b"ok", end)) == (*b"ok", 258)


def test_engine_counts_min_tokens_for_stop_strings_stop_ids_and_end_tokens():
    runner = {"script": Script(b"aXbcdefXg", b"a\x07bcdef\x07g", [*b"ab", 258, *b"cd", 256])}
    with open_engine(engine_config(), runner=runner) as engine:
        text = engine.generate("p", sampling=greedy(9, stop=("X",), min_tokens=6))
        assert (text.text, text.stop, text.usage.completion_tokens >= 8) == ("aXbcdef", "X", True)
        ids = engine.generate("p", sampling=greedy(9, stop_token_ids=(7,), min_tokens=6))
        assert (ids.text, ids.stop) == ("a\x07bcdef", 7)
        ends = engine.open("a").turn(
            "p", sampling=SamplingParams(temperature=0.0, max_tokens=9, min_tokens=4)
        )
        assert (ends.text, ends.finish_reason) == ("abcd", FinishReason.STOP)
        engine.assert_ledger()


@pytest.mark.parametrize("end", [258, 256])
def test_engine_ignores_ends_where_asked_to(end):
    script = Script([*b"ab", end, *b"cdefg"])
    with open_engine(engine_config(), runner={"script": script}) as engine:
        result = engine.open("a").turn("p", sampling=greedy(5))
        assert list(result.tokens) == [*b"ab", end, *b"cd"]
        assert (result.text, result.finish_reason) == ("abcd", FinishReason.LENGTH)
        engine.assert_ledger()
