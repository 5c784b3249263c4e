import pytest

from sessionkv.text.follow import follow_ids
from sessionkv.text.history import StoredMessage
from sessionkv.text.reply_memory import ReplyMemory
from sessionkv.types import MissReason
from tests.builders import text as built

TURNS = (("Hi <|im_end|> there", "It is raining"), ("two", "three four"), ("more", "ok"))


class Log:
    """A session of three turns whose replies were sampled one character at a time."""

    def __init__(self, text, turns=TURNS, space=""):
        self.text = text
        self.root = text.root("Be brief.", None, now_s=0.0)
        self.ids = list(self.root.ids)
        self.stored, self.messages = [], []
        closed = False
        for number, (question, answer) in enumerate(turns, start=1):
            new = built.read(question)
            self.ids += text.delta(self.root, new, first=number == 1, closed=closed)
            sampled = [i for c in space + answer for i in text.encoder.encode_text_inside(c)]
            sampled.append(min(text.eos_ids))
            ending = text.close_reply(sampled)
            closed = ending.closed
            self.add(new[0], number)
            self.ids += ending.ids(sampled)
            self.add(assistant(answer), number, ending.ids(sampled))

    def add(self, message, turn, reply_ids=None):
        self.messages.append(message)
        self.stored.append(StoredMessage(message, turn, len(self.ids), reply_ids))

    def follow(self, messages):
        return follow_ids(self.text, self.root, messages, stored=self.stored, log=self.ids)


def assistant(content):
    return built.read({"role": "assistant", "content": content})[0]


@pytest.fixture(params=built.ALL)
def log(request):
    return Log(built.ALL[request.param](), space=" " if request.param == "mistral" else "")


def test_resent_history_has_the_ids_of_the_log(log):
    followed = log.follow([*log.messages, *built.read("bye")])
    assert list(followed.ids[: len(log.ids)]) == log.ids
    assert followed.num_reused_replies == 3
    assert followed.miss.reason is MissReason.NONE


def test_what_the_model_sees_is_what_the_template_says(log):
    messages = [*log.messages, *built.read("bye")]
    text = log.text
    assert text.speller.spell(log.follow(messages).ids) == text.speller.spell(
        text.full(log.root, messages)
    )


def test_edited_reply_is_reused_up_to_the_difference(log):
    messages = [*log.messages[:3], assistant("three fork"), *log.messages[4:], *built.read("bye")]
    followed = log.follow(messages)
    miss = followed.miss
    assert (miss.reason, miss.turn, miss.message) == (MissReason.HISTORY_EDITED, 2, 3)
    assert miss.expected.startswith("ur")
    assert miss.found.startswith("rk")
    assert list(followed.ids[: miss.token]) == log.ids[: miss.token]
    assert log.text.speller.spell(followed.ids) == log.text.speller.spell(
        log.text.full(log.root, messages)
    )


def test_edited_question_is_reported_with_its_turn(log):
    messages = [*log.messages[:2], *built.read("TWO"), *log.messages[3:], *built.read("bye")]
    miss = log.follow(messages).miss
    assert (miss.reason, miss.turn, miss.message) == (MissReason.HISTORY_EDITED, 2, 2)
    assert list(log.follow(messages).ids[: miss.token]) == log.ids[: miss.token]


def test_shortened_history_is_an_edit(log):
    miss = log.follow([*log.messages[:2], *built.read("other")]).miss
    assert (miss.reason, miss.message) == (MissReason.HISTORY_EDITED, 2)


def test_reply_that_only_spells_a_control_token_is_not_taken_for_a_real_one():
    text = built.chatml()
    log = Log(text, (("Hi", "a<|im_end|>b"),))
    sent = [*log.messages, *built.read("bye")]
    assert list(log.follow(sent).ids[: len(log.ids)]) == log.ids
    real = [*built.reply(text, "a"), *built.reply(text, "b")]  # a sampled control token inside
    stored = [log.stored[0], StoredMessage(log.messages[1], 1, len(log.ids), tuple(real))]
    followed = follow_ids(text, log.root, sent, stored=stored, log=log.ids)
    assert followed.ids.count(text.closing_id) == text.full(log.root, sent).count(text.closing_id)


def test_edited_reply_never_brings_spelled_tokens_in_as_parts():
    log = Log(built.chatml_words(), (("Hi", "the <|im_end|> fox"),))
    messages = [log.messages[0], assistant("the <|im_end|> dog"), *built.read("bye")]
    text = log.text
    assert text.speller.spell(log.follow(messages).ids) == text.speller.spell(
        text.full(log.root, messages)
    )


def test_memory_gives_replies_without_a_session():
    text, memory = built.chatml_words(), ReplyMemory()
    root = text.root(None, None, now_s=0.0)
    sampled = [i for c in "the fox" for i in text.encoder.encode_text_inside(c)]
    first = follow_ids(text, root, built.read("Hi"), memory=memory, tenant="a")
    assert first.ids == text.full(root, built.read("Hi"))
    reply = text.close_reply([*sampled, text.closing_id]).ids([*sampled, text.closing_id])
    memory.put("a", first.raw, reply)
    sent = (*built.read("Hi"), assistant("the fox"), *built.read("more"))
    second = follow_ids(text, root, sent, memory=memory, tenant="a")
    assert second.ids[: len(first.ids) + len(reply)] == first.ids + reply
    assert second.num_reused_replies == 1
    other = follow_ids(text, root, sent, memory=memory, tenant="b")
    assert (other.num_reused_replies, other.ids) == (0, text.full(root, sent))


def test_memory_is_not_used_for_another_reply():
    text, memory = built.chatml_words(), ReplyMemory()
    root = text.root(None, None, now_s=0.0)
    first = follow_ids(text, root, built.read("Hi"), memory=memory)
    memory.put("", first.raw, built.reply(text, "fox"))
    sent = (*built.read("Hi"), assistant("dog"), *built.read("more"))
    assert follow_ids(text, root, sent, memory=memory).ids == text.full(root, sent)


def test_template_that_drops_thoughts_is_followed_and_named():
    text = built.think_dropping()
    log = Log(text, (("Hi", "<think>hm</think>\nhello"), ("two", "<think>ok</think>\nfox")))
    messages = [*log.messages, *built.read("bye")]
    followed = log.follow(messages)
    assert followed.ids == text.full(log.root, messages)
    assert "<think>" not in text.decode(followed.ids)
    miss = followed.miss
    assert (miss.reason, miss.turn, miss.message) == (MissReason.TEMPLATE_REWROTE, 1, 1)
    assert miss.expected.startswith("<think>") or miss.expected.startswith("<")
    assert miss.found.startswith("h")


@pytest.mark.parametrize("sent", ["hello", " hello ", "hello\n"])
@pytest.mark.parametrize("memory", [False, True])
def test_whitespace_at_the_ends_of_a_reply_is_forgiven(sent, memory):
    text = built.chatml()
    log = Log(text, (("Hi", " hello\n"),))
    messages = [log.messages[0], assistant(sent), *built.read("bye")]
    if memory:
        remembered = ReplyMemory()
        remembered.put("", text.raw(log.root, log.messages[:1]), log.stored[1].reply_ids)
        followed = follow_ids(text, log.root, messages, memory=remembered)
    else:
        followed = log.follow(messages)
    assert list(followed.ids[: len(log.ids)]) == log.ids
    assert text.decode(followed.ids[len(log.ids) :], special=True) == (
        "\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_open_reply_is_closed_by_the_template():
    text = built.chatml()
    root = text.root(None, None, now_s=0.0)
    log = text.delta(root, built.read("Hi"), first=True, closed=False) + tuple(b"hel ")
    stored = [
        StoredMessage(built.read("Hi")[0], 1, len(log) - 4),
        StoredMessage(assistant("hel "), 1, len(log), tuple(b"hel ")),
    ]
    sent = (*built.read("Hi"), assistant("hel"), *built.read("bye"))
    followed = follow_ids(text, root, sent, stored=stored, log=log)
    assert followed.ids == log + text.delta(root, built.read("bye"), first=False, closed=False)


def test_tool_calls_written_in_other_json_are_forgiven():
    text = built.llama3()
    root = text.root(None, None, now_s=0.0)

    def conversation(arguments):
        call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
        result = {"role": "tool", "tool_call_id": "c", "content": "rain"}
        return built.read("w", {"role": "assistant", "tool_calls": [call]}, result)

    old, new = conversation('{"b": 1, "a": 2}'), conversation('{"a":2,"b":1}')
    log = text.full(root, old)
    stored = [StoredMessage(message, 1, len(log)) for message in old]
    assert text.full(root, new) != log
    followed = follow_ids(text, root, new, stored=stored, log=log)
    assert (followed.ids, followed.miss.reason) == (log, MissReason.NONE)
    other = follow_ids(text, root, conversation('{"a":3,"b":1}'), stored=stored, log=log)
    assert (other.miss.reason, other.miss.message) == (MissReason.HISTORY_EDITED, 1)


def test_reply_that_begins_like_a_control_token_does_not_eat_one():
    text = built.chatml()
    root = text.root(None, None, now_s=0.0)
    prompt = text.delta(root, built.read("Hi"), first=True, closed=False)
    for sampled, sent in ((b"<", "x"), (b"a<|im_end", "a"), (b"a<|im_end|>b", "a")):
        log = prompt + tuple(sampled)
        stored = [
            StoredMessage(built.read("Hi")[0], 1, len(prompt)),
            StoredMessage(assistant(sampled.decode()), 1, len(log), tuple(sampled)),
        ]
        messages = (*built.read("Hi"), assistant(sent), *built.read("bye"))
        followed = follow_ids(text, root, messages, stored=stored, log=log)
        assert followed.ids == text.full(root, messages)
        empty = (*built.read("Hi"), assistant(""), *built.read("bye"))
        followed = follow_ids(text, root, empty, stored=stored, log=log)
        assert followed.ids == text.full(root, empty)
