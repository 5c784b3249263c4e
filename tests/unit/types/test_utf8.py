from __future__ import annotations

import pytest

from sessionkv.errors import InvalidRequest
from sessionkv.types import utf8_bytes


@pytest.mark.parametrize(("text", "size"), [("", 0), ("ab", 2), ("aé", 3), ("\U0001f600", 4)])
def test_length_is_that_of_utf8(text, size):
    assert utf8_bytes("name", text) == size


def test_lone_surrogates_are_named_and_the_error_can_be_sent():
    with pytest.raises(InvalidRequest) as caught:
        utf8_bytes("name", "é\ud83d")
    assert caught.value.details["field"] == "name"
    assert caught.value.details["value"] == "'\\ud83d'"
    caught.value.message.encode()
