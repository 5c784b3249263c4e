"""Encoding a reply's text again may give other ids than were sampled."""

import pytest

from sessionkv.text.follow import follow_ids
from sessionkv.text.reply_memory import ReplyMemory
from sessionkv.text.root import RootText
from sessionkv.types import MissReason
from tests.builders import text as built
from tests.builders.doors import Script
from tests.builders.engine import engine_config, greedy, open_engine, oracle

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


def engine_that_says(sampled, folder):
    return open_engine(
        engine_config(blocks=512), runner={"text_dir": folder, "script": Script(sampled)}
    )


def both_ways(engine, text, sampled, content):
    """A session's next turn, and the same conversation sent whole by two who never spoke here."""
    session = engine.open("a")
    first = session.turn("Hi", sampling=greedy(len(sampled), ignore_eos=False))
    assert (first.text, list(first.tokens)) == (content, list(sampled))
    second = session.turn("more", sampling=greedy(4))
    log = engine.parts.tree.tokens_of(engine.parts.tree.head("local", "a").node_id)
    assert list(sampled) == log[first.usage.prompt_tokens :][: len(sampled)]
    assert second.cache.miss.reason is MissReason.NONE
    assert second.cache.device_tokens == first.usage.prompt_tokens + len(sampled) - 1
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": content},
        {"role": "user", "content": "more"},
    ]
    whole = engine.generate(messages=messages, sampling=greedy(4))
    ids = text.full(RootText(None, None, 0.0), built.read(*messages))
    assert whole.usage.prompt_tokens == len(ids)
    assert list(whole.tokens) == oracle(ids, greedy(4), vocab_size=text.vocab_size)
    shared = next(i for i, (a, b) in enumerate(zip(ids, log, strict=False)) if a != b)
    assert first.usage.prompt_tokens <= shared == whole.cache.device_tokens < len(ids) - 1
    engine.assert_ledger()


def test_engine_keeps_the_sampled_ids_in_sessions_and_is_right_without(tmp_path):
    text = built.chatml_words()
    sampled = (*drifting(text), text.closing_id)
    folder = built.write_folder("chatml_words", tmp_path)
    with engine_that_says(sampled, folder) as engine:
        both_ways(engine, text, sampled, "the fox jumps")


def test_engine_finds_a_reply_of_its_own_in_a_resent_history(tmp_path):
    text = built.chatml_words()
    sampled = (*drifting(text), text.closing_id)
    folder = built.write_folder("chatml_words", tmp_path)
    with engine_that_says(sampled, folder) as engine:
        messages = [{"role": "user", "content": "Hi"}]
        first = engine.generate(messages=messages, sampling=greedy(len(sampled), ignore_eos=False))
        messages += [
            {"role": "assistant", "content": first.text}, {"role": "user", "content": "more"},
        ]  # fmt: skip
        second = engine.generate(messages=messages, sampling=greedy(4))
        assert second.cache.device_tokens == first.usage.prompt_tokens + len(sampled) - 1


@pytest.mark.model
def test_measured_case_on_an_engine():
    text, sampled = built.smollm2(), (*SAMPLED[0], 2)
    with engine_that_says(sampled, built.smollm2_folder()) as engine:
        both_ways(engine, text, sampled, " lucklanerelated")
