"""A template that drops the thoughts of earlier replies: followed exactly, kept in sessions."""

import pytest

from sessionkv.text.follow import follow_ids
from sessionkv.text.reply_memory import ReplyMemory
from sessionkv.text.root import RootText
from sessionkv.types import MissReason
from tests.builders import text as built
from tests.builders.doors import Script
from tests.builders.engine import engine_config, greedy, open_engine, oracle

THOUGHT = "<think>" + "a long chain of thought " * 20 + "</think>\n"
TURNS = (("one", THOUGHT + "first"), ("two", THOUGHT + "second"), ("three", THOUGHT + "third"))


def test_resent_histories_get_exactly_what_the_template_renders():
    text, memory = built.think_dropping(), ReplyMemory()
    root = RootText(None, None, 0.0)
    messages = []
    for question, answer in TURNS:
        messages += built.read(question)
        followed = follow_ids(text, root, messages, memory=memory, tenant="local")
        assert followed.ids == text.full(root, messages)
        memory.put("local", followed.raw, built.reply(text, answer))
        messages += built.read({"role": "assistant", "content": answer})


def test_prompts_share_ids_up_to_the_first_dropped_thought():
    text = built.think_dropping()
    root = RootText(None, None, 0.0)
    first = text.full(root, built.read("one"))
    reply = built.reply(text, TURNS[0][1])
    sent = built.read("one", {"role": "assistant", "content": TURNS[0][1]}, "two")
    second = follow_ids(text, root, sent).ids
    assert second[: len(first)] == first
    assert second[len(first)] != reply[0]


def test_session_turns_continue_the_log_with_its_thoughts():
    text = built.think_dropping()
    root = text.root(None, None, now_s=0.0)
    assert root.append_only
    log, closed, reused = [], False, []
    for number, (question, answer) in enumerate(TURNS):
        delta = text.delta(root, built.read(question), first=number == 0, closed=closed)
        reused.append(len(log) / (len(log) + len(delta)))
        log += delta
        sampled = built.reply(text, answer)
        ending = text.close_reply(sampled)
        log += ending.ids(sampled)
        closed = ending.closed
    assert text.decode(log).count("</think>") == 3
    assert min(reused[1:]) >= 0.9


def thinking_engine(tmp_path, script):
    folder = built.write_folder("think_dropping", tmp_path)
    return open_engine(engine_config(blocks=2048), runner={"text_dir": folder, "script": script})


def test_resent_histories_on_an_engine_reuse_up_to_the_first_dropped_thought(tmp_path):
    text, script = built.think_dropping(), Script()
    root = RootText(None, None, 0.0)
    with thinking_engine(tmp_path, script) as engine:
        messages: list[dict[str, str]] = []
        log: list[int] = []
        for number, (question, answer) in enumerate(TURNS):
            reply = built.reply(text, answer)
            script.add(reply)
            messages.append({"role": "user", "content": question})
            ids = text.full(root, built.read(*messages))
            sampling = greedy(len(reply), ignore_eos=False)
            result = engine.generate(messages=messages, sampling=sampling)
            assert result.text == answer
            assert result.usage.prompt_tokens == len(ids)
            if number:
                shared = next(i for i, (a, b) in enumerate(zip(ids, log, strict=False)) if a != b)
                assert result.cache.device_tokens == shared
            # What follows is a hash of the prompt: warm equals cold on the ids of the template.
            script.add(())
            hashed = engine.generate(messages=messages, sampling=greedy(4))
            assert list(hashed.tokens) == oracle(ids, greedy(4), vocab_size=text.vocab_size)
            log = [*ids, *result.tokens]
            messages.append({"role": "assistant", "content": answer})
        engine.assert_ledger()


@pytest.mark.parametrize("history", ["keep", "follow"])
def test_session_turns_on_an_engine_keep_or_follow(tmp_path, history):
    text, script = built.think_dropping(), Script()
    with thinking_engine(tmp_path, script) as engine:
        session = engine.open("a", history=history)
        messages, reused = [], []
        for question, answer in TURNS:
            reply = built.reply(text, answer)
            script.add(reply)
            messages.append({"role": "user", "content": question})
            sent = messages if history == "follow" else messages[-1:]
            result = session.turn(messages=sent, sampling=greedy(len(reply), ignore_eos=False))
            messages.append({"role": "assistant", "content": result.text})
            reused.append(result.cache.cached_tokens / result.cache.prompt_tokens)
        log = engine.parts.tree.tokens_of(engine.parts.tree.head("local", "a").node_id)
        if history == "keep":
            assert min(reused[1:]) >= 0.9
            assert text.decode(log).count("</think>") == 3
            assert result.cache.miss.reason is MissReason.NONE
        else:
            assert text.decode(log).count("</think>") == 1
            root = RootText(None, None, 0.0)
            assert tuple(log[: -len(reply)]) == text.full(root, built.read(*messages[:-1]))
            assert result.cache.miss.reason is MissReason.TEMPLATE_REWROTE
        engine.assert_ledger()
