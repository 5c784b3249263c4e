"""A lone surrogate cannot be stored or sent; it is refused where it comes in."""

import pytest

from sessionkv.errors import InvalidRequest
from sessionkv.text.messages import dump_messages
from tests.builders import text as built


def test_turn_with_a_lone_surrogate_is_refused_and_the_next_one_works():
    text = built.chatml()
    root = text.root(None, None, now_s=0.0)
    log = text.delta(root, built.read("fine"), first=True, closed=False)
    with pytest.raises(InvalidRequest) as caught:
        built.read("ok\ud83d")
    assert caught.value.details["field"] == "messages[0].content"
    assert dump_messages(built.read("clean"))
    log += text.delta(root, built.read("clean"), first=False, closed=False)
    assert text.decode(log).count("clean") == 1


def test_whole_pairs_are_ordinary_text():
    assert built.read("ok\U0001f600")[0].content == "ok\U0001f600"
