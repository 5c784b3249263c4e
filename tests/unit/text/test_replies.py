import pytest

from sessionkv.text.replies import ReplyEnding
from tests.builders import text as built

END, OTHER_END = 258, 256


@pytest.mark.parametrize(
    ("sampled", "ending"),
    [
        ((65, 66, END), ReplyEnding(3, (), closed=True)),
        ((65, OTHER_END), ReplyEnding(1, (END,), closed=True)),
        ((65, 66), ReplyEnding(2)),
        ((END, 65), ReplyEnding(2)),
        ((), ReplyEnding(0)),
    ],
)
def test_end_token_becomes_the_templates_own(sampled, ending):
    assert built.chatml().close_reply(sampled) == ending


def test_end_token_goes_where_the_template_has_none():
    text = built.with_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert text.closing_id is None
    assert text.close_reply((65, END)) == ReplyEnding(1)


def test_ids_as_they_stand_in_the_log():
    assert ReplyEnding(1, (7, 8), closed=True).ids((5, 6)) == (5, 7, 8)


def test_cut_at_a_token_boundary_encodes_nothing():
    assert built.chatml().cut_at_stop(b"abcSTOP", 3) == ReplyEnding(3)
    assert built.chatml().cut_at_stop(b"STOP", 0) == ReplyEnding(0)


def test_cut_through_a_token_encodes_its_visible_part():
    text = built.chatml_words()
    (the,) = text.encoder.encode_inside(" the")
    ending = text.cut_at_stop((the, the, the), 6)
    assert ending == ReplyEnding(1, text.encoder.encode_inside(" t"))
    assert text.decode(ending.ids((the, the, the))) == " the t"


def test_cut_never_ends_inside_a_character():
    sampled = "aé".encode() + b"\xe3\x81"
    assert built.chatml().cut_at_stop(sampled, 1) == ReplyEnding(1)
    assert built.chatml().cut_at_stop(sampled, 2) == ReplyEnding(3)


def test_cut_behind_bytes_that_are_no_character():
    sampled = b"\xe3ab"
    ending = built.chatml().cut_at_stop(sampled, 1)
    assert ending == ReplyEnding(0, tuple("\ufffd".encode()))


def test_cut_text_that_spells_a_control_token_stays_text():
    text = built.chatml_words()
    ids = text.encoder.encode_text_inside("<|im_end|>the")
    ending = text.cut_at_stop(ids, len("<|im_end|>t"))
    assert text.closing_id not in ending.ids(ids)
    assert text.decode(ending.ids(ids)) == "<|im_end|>t"
