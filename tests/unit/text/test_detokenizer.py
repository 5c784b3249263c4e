import pytest

from sessionkv.text.detokenizer import Detokenizer, unfinished

BYTES = {i: bytes([i]) for i in range(256)} | {300: b" the", 301: "é".encode(), 302: b""}


def pieces(ids, **options):
    detokenizer = Detokenizer(BYTES, **options)
    return [detokenizer.push_one(i) for i in ids] + [detokenizer.finish()]


def test_a_character_comes_out_with_its_last_byte():
    assert pieces([0xE3, 0x81, 0x82]) == ["", "", "\u3042", ""]


def test_unfinished_character_at_the_end_is_one_replacement():
    assert pieces([0x61, 0xF0, 0x9F]) == ["a", "", "", "\ufffd"]


def test_bytes_that_cannot_become_a_character_come_out_at_once():
    assert pieces([0x82, 0xE3, 0x41]) == ["\ufffd", "", "\ufffdA", ""]


def test_push_takes_several_ids():
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push([300, 0xC3]) == " the"
    assert detokenizer.pending
    assert detokenizer.push([0xA9]) == "é"
    assert not detokenizer.pending


def test_one_leading_space_is_dropped_once():
    assert "".join(pieces([302, 300, 300], strip_space=True)) == "the the"
    assert "".join(pieces([0x20, 0x20, 0x41], strip_space=True)) == " A"
    assert "".join(pieces([300])) == " the"


def test_reply_may_finish_the_prompts_last_character():
    assert pieces([0x82, 0x41], before=b"\xe3\x81") == ["\u3042", "A", ""]


@pytest.mark.parametrize(
    ("data", "tail"),
    [
        (b"", b""),
        (b"abc", b""),
        ("aé".encode(), b""),
        (b"a\xc3", b"\xc3"),
        (b"\xe3\x81", b"\xe3\x81"),
        ("\u3042".encode(), b""),
        (b"\xf0\x9f\x98", b"\xf0\x9f\x98"),
        ("\U0001f600".encode(), b""),
        (b"\x81\x81\x81\x81", b""),
        (b"\xe3a", b""),
    ],
)
def test_unfinished(data, tail):
    assert unfinished(data) == tail
