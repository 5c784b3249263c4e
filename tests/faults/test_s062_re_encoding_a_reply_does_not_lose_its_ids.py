"""Encoding a reply's text again may give other ids than were sampled."""

import pytest

from sessionkv.text.follow import follow_ids
from sessionkv.text.reply_memory import ReplyMemory
from sessionkv.text.root import RootText
from tests.builders import text as built

SAMPLED = [[8905, 37403, 4235], [8905, 15034, 518, 23207]]


def conversation(text, content):
    return built.read("Hi", {"role": "assistant", "content": content}, "more")


def drifting(text):
    """Ids of one character each, which encode as fewer."""
    ids = tuple(i for c in "the fox jumps" for i in text.encoder.encode_text_inside(c))
    assert text.encoder.encode_text_inside("the fox jumps") != ids
    return ids


@pytest.mark.parametrize("name", ["chatml_words", "llama3", "gemma"])
def test_session_keeps_and_resent_history_finds_the_sampled_ids(name):
    text = built.ALL[name]()
    sampled = (*drifting(text), text.closing_id)
    root = RootText(None, None, 0.0)
    prompt = text.full(root, built.read("Hi"))
    memory = ReplyMemory()
    memory.put("t", text.raw(root, built.read("Hi")), sampled)
    sent = conversation(text, "the fox jumps")
    followed = follow_ids(text, root, sent, memory=memory, tenant="t").ids
    assert followed[: len(prompt) + len(sampled)] == prompt + sampled
    forgotten = follow_ids(text, root, sent).ids
    assert forgotten[: len(prompt)] == prompt
    assert text.decode(forgotten, special=True) == text.decode(followed, special=True)


def test_split_is_found_by_text_and_not_by_its_length():
    text = built.chatml_words()
    root, memory = RootText(None, None, 0.0), ReplyMemory()
    memory.put("t", text.raw(root, built.read("Hi")), (*drifting(text), text.closing_id))
    other = conversation(text, "the dog jumps")  # as long as the reply that is remembered
    followed = follow_ids(text, root, other, memory=memory, tenant="t").ids
    assert text.decode(followed, special=True) == text.decode(text.full(root, other), special=True)


@pytest.mark.model
def test_measured_case_of_the_default_model():
    text = built.smollm2()
    sampled, encoded = SAMPLED
    assert text.decode(sampled) == " lucklanerelated"
    assert list(text.encoder.encode(" lucklanerelated")) == encoded
    root, memory = RootText(None, None, 0.0), ReplyMemory()
    prompt = text.full(root, built.read("Hi"))
    memory.put("t", text.raw(root, built.read("Hi")), (*sampled, 2))
    sent = conversation(text, " lucklanerelated")
    known = follow_ids(text, root, sent, memory=memory, tenant="t").ids
    unknown = follow_ids(text, root, sent).ids
    assert known[len(prompt) : len(prompt) + 3] == tuple(sampled)
    assert unknown[len(prompt) : len(prompt) + 4] == tuple(encoded)
