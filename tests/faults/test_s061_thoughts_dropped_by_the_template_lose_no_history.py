"""A template that drops the thoughts of earlier replies: followed exactly, kept in sessions."""

from sessionkv.text.follow import follow_ids
from sessionkv.text.reply_memory import ReplyMemory
from sessionkv.text.root import RootText
from tests.builders import text as built

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
