import pytest
from tokenizers import Tokenizer, decoders, models

from sessionkv.errors import ModelUnsupported
from sessionkv.text.vocabulary import Vocabulary, byte_alphabet
from tests.builders.text import byte_fallback, byte_level


def test_byte_alphabet_names_every_byte_once():
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert alphabet["A"] == 65
    assert alphabet["\u0120"] == 32  # the space of GPT-2's vocabulary


def test_control_tokens_are_spelled_in_shown_and_absent_in_visible():
    vocabulary = Vocabulary(byte_level(("<|im_end|>",)))
    assert vocabulary.control == {"<|im_end|>": 0}
    assert vocabulary.spellings == {0: "<|im_end|>"}
    assert vocabulary.shown[0] == b"<|im_end|>"
    assert vocabulary.visible[0] == b""


def test_ordinary_additions_are_visible_and_not_control():
    tokenizer = byte_level(("<|im_end|>",))
    vocabulary = Vocabulary(tokenizer)
    think = tokenizer.token_to_id("<think>")
    assert vocabulary.visible[think] == b"<think>"
    assert "<think>" not in vocabulary.control


def test_byte_tokens_and_word_marks():
    tokenizer = byte_fallback(prefix=True)
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.shown[tokenizer.token_to_id("<0xE3>")] == b"\xe3"
    assert vocabulary.shown[tokenizer.token_to_id("\u2581the")] == b" the"
    assert vocabulary.strips_space


def test_id_without_a_token_is_empty():
    assert Vocabulary(byte_level(("<|im_end|>",))).visible[99_999] == b""


@pytest.mark.parametrize(
    ("decoder", "strips"),
    [
        (decoders.Metaspace(), True),
        (decoders.Metaspace(prepend_scheme="never"), False),
        (decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()]), False),
    ],
)
def test_leading_space_rule_is_the_decoders(decoder, strips):
    tokenizer = Tokenizer(models.BPE(vocab={"\u2581a": 0}, merges=[]))
    tokenizer.decoder = decoder
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.strips_space is strips
    assert vocabulary.shown[0] == b" a"


def test_unknown_decoder_is_refused_by_name():
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ModelUnsupported, match="WordPiece"):
        Vocabulary(tokenizer)


def test_missing_decoder_is_refused():
    with pytest.raises(ModelUnsupported, match="no decoder"):
        Vocabulary(Tokenizer(models.BPE(vocab={"a": 0}, merges=[])))
