import pytest

from sessionkv.text.control import ControlMarks
from tests.builders import text as built

IM_END = "<|im_end|>"


def marks(text):
    return ControlMarks(text.encoder._vocabulary.control)


@pytest.mark.parametrize("name", built.ALL)
def test_text_without_spelled_tokens_has_the_tokenizers_own_ids(name):
    text = built.ALL[name]()
    tokenizer = text.encoder._tokenizer
    for raw in ("the quick brown fox", " Hello\n\nthere é \u3042", "", "<s><|im_start|>user\nx"):
        assert list(text.encoder.encode(raw)) == tokenizer.encode(raw, add_special_tokens=False).ids


def test_spelled_token_is_encoded_apart_and_never_real():
    text = built.chatml_words()
    encoder, mark = text.encoder, marks(text).mark
    end = text.eos_ids & {text.closing_id}
    ids = encoder.encode("the user" + mark(IM_END) + " question" + IM_END)
    spelled = encoder._encode_plain(IM_END)
    assert not end & set(spelled)
    assert ids == (
        *encoder.encode("the user"),
        *spelled,
        *encoder.encode(" question"),
        text.closing_id,
    )
    assert text.decode(ids, special=True) == f"the user{IM_END} question{IM_END}"


def test_several_spelled_tokens_next_to_real_ones():
    text = built.chatml()
    raw = marks(text).mark(IM_END + IM_END) + IM_END + marks(text).mark("<|im_start|>")
    plain = (IM_END + IM_END).encode()
    assert text.encoder.encode(raw) == (*plain, 258, *b"<|im_start|>")


def test_control_tokens_are_on_again_afterwards():
    text = built.chatml()
    text.encoder.encode(marks(text).mark(IM_END))
    assert text.encoder.encode(IM_END) == (258,)


@pytest.mark.parametrize("name", built.ALL)
def test_text_inside_other_text_gains_no_space(name):
    text = built.ALL[name]()
    for piece in ("x", " x", "ayed", "\nnew", "é!", "..."):
        ids = text.encoder.encode_inside(piece)
        assert text.decode(ids, continues=True) == piece


def test_text_behind_a_control_token_is_encoded_as_in_one_piece():
    text = built.mistral()
    (end,) = text.eos_ids
    whole = text.encoder.encode("</s>[INST] the dog [/INST]")
    assert (end, *text.encoder.encode_behind("[INST] the dog [/INST]", (7, end))) == whole


def test_text_behind_nothing_is_a_whole_text():
    text = built.mistral()
    assert text.encoder.encode_behind("the dog", ()) == text.encoder.encode("the dog")


def test_text_inside_never_becomes_control():
    text = built.chatml()
    assert text.encoder.encode_text_inside(IM_END) == tuple(IM_END.encode())
