"""Randomised turns over every kind of tokenizer: the log, what is shown, what the template says."""

import random

import pytest

from sessionkv.text.follow import follow_ids
from sessionkv.text.history import StoredMessage
from sessionkv.text.messages import Message
from sessionkv.types import MissReason
from tests.builders import text as built

TURNS_PER_MODEL = 180
ALPHABET = [
    *"abc xyz.!\n",
    "the ",
    "é",
    "\u3042",
    "e\u0301",
    "\U0001f600",
    "\u200b",
    "\U0010fffd",
    "<|",
    "|>",
]
SPELLED = ["<|im_end|>", "<|im_start|>", "</s>", "<s>", "<|eot_id|>", "<end_of_turn>", "[INST]"]


class Session:
    """One conversation, driven turn by turn, with everything checked on the way."""

    def __init__(self, text, rng):
        self.text, self.rng = text, rng
        system = "Be brief." if rng.random() < 0.5 else None
        self.root = text.root(system, None, now_s=0.0)
        self.log = list(self.root.ids)
        self.messages, self.stored = [], []
        self.closed = False
        self.plain = True  # every reply so far is text that the template writes back as it is
        self.known = True  # the same, but for whitespace at its ends
        self.spaced = text is built.mistral()
        self.control = set(text.encoder._vocabulary.spellings)

    def turn(self):
        self.ask()
        sampled, end = self.sample()
        shown, ending = self.stream(sampled, end)
        reply_ids = ending.ids(sampled)
        self.log += reply_ids
        self.closed = ending.closed
        self.check_reply(shown, reply_ids)
        number = len(self.messages)
        self.messages.append(Message("assistant", shown))
        self.stored.append(StoredMessage(self.messages[-1], number, len(self.log), reply_ids))

    def ask(self):
        """Append a question; nothing spelled in it may become a control token."""
        words = "".join(self.rng.choices([*ALPHABET, *SPELLED], k=self.rng.randrange(1, 20)))
        first = not self.messages
        deltas = [
            self.text.delta(self.root, (Message("user", content),), first=first, closed=self.closed)
            for content in (words.strip() or "x", "x")
        ]
        real, neutral = ([i for i in delta if i in self.control] for delta in deltas)
        assert real == neutral
        self.messages.append(Message("user", words.strip() or "x"))
        self.log += deltas[0]
        self.stored.append(StoredMessage(self.messages[-1], len(self.messages), len(self.log)))
        self.check_log()

    def sample(self):
        rng = self.rng
        if rng.random() < 0.3:
            size = rng.randrange(1, 12)
            ids = [rng.randrange(self.text.vocab_size) for _ in range(size)]
            ids = [i for i in ids if i not in self.text.eos_ids]
        else:
            words = "".join(rng.choices(ALPHABET, k=rng.randrange(1, 20))).strip() or "x"
            ids = self.encode_oddly((" " if self.spaced else "") + words)
        end = rng.choice(["eos", "length", "stop"])
        if end == "eos":
            ids.append(rng.choice(sorted(self.text.eos_ids)))
        return ids, end

    def encode_oddly(self, words):
        ids = []
        while words:
            size = self.rng.randrange(1, 8)
            ids += self.text.encoder.encode_text_inside(words[:size])
            words = words[size:]
        return ids

    def stream(self, sampled, end):
        whole = self.text.decode(sampled)
        stops = []
        if end == "stop" and whole:
            at = self.rng.randrange(len(whole))
            stops = [whole[at : at + self.rng.randrange(1, 5)], "never there"]
        stream = self.text.reply_stream(stops)
        pieces = [stream.push(i).text for i in sampled] + [stream.finish().text]
        shown = "".join(pieces)
        assert shown == stream.text
        if stream.stop is None:
            assert shown == whole
            return shown, self.text.close_reply(sampled)
        assert shown == whole[: whole.index(stops[0])]
        assert len(shown) == stream.stop.start
        return shown, self.text.cut_at_stop(sampled, len(shown))

    def check_reply(self, shown, reply_ids):
        assert self.text.decode(reply_ids) == shown
        body = reply_ids[:-1] if self.closed else reply_ids
        spelled = self.text.decode(body, continues=True, special=True)
        expected = (" " if self.spaced else "") + shown
        self.known &= spelled == expected and "</think>" not in shown
        self.plain &= self.known and shown == shown.strip() != ""

    def check_log(self):
        """The log spells what the template writes, and resending the history gives its ids."""
        spell = self.text.speller.spell
        if self.plain:
            raw = self.text.raw(self.root, self.messages)
            assert spell(self.log) == spell(self.text.full(self.root, self.messages))
            assert self.spaced or spell(self.log) == raw
        if self.known:
            before = self.stored[:-1]
            log = self.log[: before[-1].end_token] if before else []
            followed = follow_ids(self.text, self.root, self.messages, stored=before, log=log)
            assert followed.miss.reason is MissReason.NONE
            assert list(followed.ids) == self.log
            self.check_edit(before, log)

    def check_edit(self, before, log):
        """Whatever a client changes, the model sees what the template says of it."""
        if not self.plain:
            return
        messages = list(self.messages)
        index = self.rng.randrange(len(messages))
        content = messages[index].content
        kept = content[: self.rng.randrange(len(content) + 1)]
        added = "".join(self.rng.choices([*ALPHABET, *SPELLED, ""], k=2))
        messages[index] = Message(messages[index].role, (kept + added).strip() or "x")
        followed = follow_ids(self.text, self.root, messages, stored=before, log=log)
        spell = self.text.speller.spell
        assert spell(followed.ids) == spell(self.text.full(self.root, messages))


@pytest.mark.parametrize("name", built.ALL)
def test_random_turns(name):
    run(built.ALL[name](), random.Random(name))


@pytest.mark.model
def test_random_turns_of_the_default_model():
    run(built.smollm2(), random.Random("smollm2"))


def run(text, rng):
    turns = 0
    while turns < TURNS_PER_MODEL:
        session = Session(text, rng)
        for _ in range(rng.randrange(1, 7)):
            session.turn()
            turns += 1


@pytest.mark.parametrize("name", built.ALL)
def test_pieces_are_the_whole_whatever_the_ids(name):
    text, rng = built.ALL[name](), random.Random(name)
    for _ in range(300):
        ids = [rng.randrange(text.vocab_size + 5) for _ in range(rng.randrange(1, 30))]
        stream = text.reply_stream()
        pieces = [stream.push(i).text for i in ids] + [stream.finish().text]
        assert "".join(pieces) == text.decode(ids)
        assert all("\ufffd" not in p or "\ufffd" in text.decode(ids) for p in pieces)


@pytest.mark.parametrize("name", ["chatml", "chatml_words", "llama3"])
def test_byte_level_decoding_is_the_tokenizers(name):
    check_decoding(built.ALL[name](), random.Random(name))


@pytest.mark.model
def test_decoding_of_the_default_model_is_the_tokenizers():
    check_decoding(built.smollm2(), random.Random("smollm2"))


def check_decoding(text, rng):
    tokenizer = text.encoder._tokenizer
    for _ in range(500):
        ids = [rng.randrange(text.vocab_size) for _ in range(rng.randrange(1, 30))]
        assert text.decode(ids) == tokenizer.decode(ids)
        assert text.decode(ids, special=True) == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", ["mistral", "gemma"])
def test_byte_fallback_decoding_of_text_is_the_tokenizers(name):
    text, rng = built.ALL[name](), random.Random(name)
    tokenizer = text.encoder._tokenizer
    for _ in range(500):
        ids = text.encode_prompt("".join(rng.choices(ALPHABET, k=10)))
        assert text.decode(ids) == tokenizer.decode(list(ids))
