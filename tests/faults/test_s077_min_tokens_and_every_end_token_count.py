"""Stops before min_tokens do not count; each of several end tokens ends a turn."""

import pytest

from tests.builders import text as built


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
