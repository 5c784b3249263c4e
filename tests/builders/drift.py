"""Random turns on one engine, each checked: what is in log and KV is what was sampled.

The runner samples what the test plans: real-looking text in odd tokens, half characters, control
tokens, any ids. So the test knows every id, and checks after each turn that the log grew by them
and by nothing else, that no full block of the history was computed again, and, by a probe that
samples by checksum, that the KV of the whole log is that of its ids.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from sessionkv import FinishReason, SamplingParams
from sessionkv.client.results import TurnResult
from sessionkv.text.model import TextModel
from sessionkv.types import MissReason
from tests.builders.engine import greedy

ALPHABET = [
    *"abc xyz.!\n", "the ", "<|", "|>",
    "é", "\u3042", "e\u0301", "\U0001f600", "\u200b", "\U0010fffd",
]  # fmt: skip
SPELLED = ["<|im_end|>", "<|im_start|>", "</s>", "<s>", "<|eot_id|>", "<end_of_turn>", "[INST]"]
PROBE = greedy(3)


class Planned:
    """A runner's script: the planned ids in turn, then any; what was sampled is kept.

    One turn at a time; without a plan the hash decides.
    """

    def __init__(self, vocab_size: int, rng: random.Random) -> None:
        self.plan: Sequence[int] | None = None
        self.sampled: list[int] = []
        self._vocab_size = vocab_size
        self._rng = rng
        self._running: Sequence[int] = ()

    def __call__(self, token_ids: Sequence[int]) -> int | None:
        if self.plan is None:
            return None
        if token_ids is not self._running:
            self._running = token_ids
            self.sampled = []
        at = len(self.sampled)
        token_id = self.plan[at] if at < len(self.plan) else self._rng.randrange(self._vocab_size)
        self.sampled.append(token_id)
        return token_id


class Conversation:
    """One session as the test knows it.

    Attributes:
        ends: Of each turn: length of the log after it, and how many of its ids have KV.
    """

    def __init__(self, session: Any, log: list[int], ends: list[tuple[int, int]]) -> None:
        self.session = session
        self.log = log
        self.ends = ends


class Drifter:
    """Drives one engine through random turns. ``oracle(ids)`` is what a cold engine answers."""

    def __init__(
        self,
        engine: Any,
        text: TextModel,
        planned: Planned,
        rng: random.Random,
        *,
        oracle: Callable[[Sequence[int]], list[int]],
        systems: Sequence[str | None],
        block_size: int,
    ) -> None:
        self.engine = engine
        self.text = text
        self.planned = planned
        self.rng = rng
        self.oracle = oracle
        self.systems = systems
        self.block_size = block_size
        self.conversations: list[Conversation] = []
        self.num_turns = 0
        self.ends: Counter[str] = Counter()
        self._names = 0

    def step(self) -> None:
        """One random thing."""
        choice = self.rng.random()
        if not self.conversations or (choice < 0.06 and len(self.conversations) < 6):
            self._open()
        elif choice < 0.12:
            self._fork(self.rng.choice(self.conversations))
        elif choice < 0.18:
            self._rewind(self.rng.choice(self.conversations))
        else:
            self.turn(self.rng.choice(self.conversations))

    def _open(self) -> None:
        self._names += 1
        system = self.rng.choice(self.systems)
        session = self.engine.open(f"s{self._names}", system=system)
        self.conversations.append(Conversation(session, [], []))

    def _fork(self, source: Conversation) -> None:
        self._names += 1
        fork = source.session.fork(f"s{self._names}")
        self.conversations.append(Conversation(fork, list(source.log), list(source.ends)))
        if len(self.conversations) > 6:
            gone = self.conversations.pop(self.rng.randrange(6))
            gone.session.close(keep=False)

    def _rewind(self, conversation: Conversation) -> None:
        turns = self.rng.randrange(1, 3)
        if turns <= len(conversation.ends):
            conversation.session.rewind(turns)
            del conversation.ends[-turns:]
            end = conversation.ends[-1][0] if conversation.ends else 0
            del conversation.log[end:]
            assert self.log_of(conversation.session.name) == conversation.log

    def log_of(self, name: str) -> list[int]:
        """A session's ids, as the engine has them."""
        tree = self.engine.parts.tree
        return list(tree.tokens_of(tree.head("local", name).node_id))

    # One turn ------------------------------------------------------------------------------------

    def turn(self, conversation: Conversation) -> None:
        """One turn of a random kind, with every check."""
        rng = self.rng
        reply = self._reply()
        sampling = self._sampling(reply)
        words = "".join(rng.choices([*ALPHABET, *SPELLED], k=rng.randrange(1, 20))).strip() or "x"
        self.planned.plan = reply
        if rng.random() < 0.25:
            result = self._cancelled(conversation, words, sampling, keep=rng.random() < 0.8)
        else:
            result = conversation.session.turn(words, sampling=sampling)
        self.planned.plan = None
        self.num_turns += 1
        log = self.log_of(conversation.session.name)
        self.ends[_how(result)] += 1
        if result is None:
            assert log == conversation.log
            return
        self._check(conversation, result, log, sampling)
        self._probe(conversation)

    def _cancelled(
        self, conversation: Conversation, words: str, sampling: SamplingParams, *, keep: bool
    ) -> TurnResult | None:
        stream = conversation.session.stream(words, sampling=sampling)
        told = list(islice(stream, self.rng.randrange(1, 4)))
        result = told[-1].result or stream.cancel(keep=keep)
        if result is not None and result.finish_reason is FinishReason.CANCELLED:
            # What was delivered is kept, and the text of it is that of the whole.
            assert len(result.tokens) >= sum(len(event.tokens) for event in told)
            assert result.text.startswith("".join(event.text for event in told))
        return result

    def _reply(self) -> list[int]:
        rng = self.rng
        if rng.random() < 0.3:
            return [rng.randrange(self.text.vocab_size) for _ in range(rng.randrange(1, 16))]
        words = "".join(rng.choices([*ALPHABET, *SPELLED], k=rng.randrange(1, 20)))
        ids: list[int] = []
        while words:  # in other tokens than the tokenizer would choose
            size = rng.randrange(1, 8)
            ids += self.text.encoder.encode_text_inside(words[:size])
            words = words[size:]
        return ids

    def _sampling(self, reply: list[int]) -> SamplingParams:
        rng = self.rng
        whole = self.text.decode(reply)
        stops: list[str] = []
        if whole and rng.random() < 0.35:
            at = rng.randrange(len(whole))
            stops = [whole[at : at + rng.randrange(1, 5)], "never there"]
        if rng.random() < 0.4:
            reply.append(rng.choice(sorted(self.text.eos_ids)))
        size = len(reply)
        return SamplingParams(
            max_tokens=rng.choice((size, size, max(1, size - 1), size + 6)),
            stop=tuple(stops),
            stop_token_ids=(rng.choice(reply),) if rng.random() < 0.1 else (),
            min_tokens=1 if rng.random() < 0.2 else 0,
            ignore_eos=rng.random() < 0.2,
            logprobs=0 if rng.random() < 0.2 else None,
        )

    # Checks --------------------------------------------------------------------------------------

    def _check(
        self,
        conversation: Conversation,
        result: TurnResult,
        log: list[int],
        sampling: SamplingParams,
    ) -> None:
        before, tokens = len(conversation.log), list(result.tokens)
        assert log[:before] == conversation.log
        prompt = result.usage.prompt_tokens
        assert log[prompt:] == tokens
        kept = self._kept(result, tokens, sampling)
        written = conversation.ends[-1][1] if conversation.ends else 0
        assert result.cache.cached_tokens >= written // self.block_size * self.block_size
        if conversation.ends:
            assert result.cache.miss.reason is MissReason.NONE, result.cache.miss
        assert self.text.decode(tokens) == result.text
        if sampling.logprobs is not None:
            assert result.logprobs is not None
            assert [entry[0].token_id for entry in result.logprobs] == tokens[:kept]
        # The last one sampled has no KV yet, and what was put in its place never had any.
        sampled = len(self.planned.sampled)
        num_written = prompt + (kept if kept < sampled else kept - 1)
        conversation.log = log
        conversation.ends.append((len(log), num_written))

    def _kept(self, result: TurnResult, tokens: list[int], sampling: SamplingParams) -> int:
        """How many sampled ids the log kept; what follows them is accounted for."""
        sampled = self.planned.sampled
        limit = min(len(tokens), len(sampled))
        kept = next((i for i in range(limit) if tokens[i] != sampled[i]), limit)
        if result.finish_reason in (FinishReason.LENGTH, FinishReason.CANCELLED):
            assert kept >= len(tokens) - 1
            # An end token that was no end stands for the template's closing at the very end.
            assert kept == len(tokens) or tokens[kept:] == [self.text.closing_id]
        elif result.stop is None:
            assert sampled[-1] in self.text.eos_ids
            assert tokens[:-1] == sampled[:-1] or tokens == sampled[:-1]
            assert kept == len(tokens) or tokens[kept:] == [self.text.closing_id]
        elif isinstance(result.stop, int):
            assert sampled[len(tokens)] == result.stop
            assert kept == len(tokens)
        else:
            rest = self.text.decode(tokens[:kept])
            assert result.text.startswith(rest)
            cut = self.text.decode(sampled)
            assert cut.startswith(result.text + result.stop) or sampling.min_tokens
            # At most a character's tail and the visible part of one token are encoded anew.
            assert self.text.decode(sampled[: kept + 1 + _LONGEST]).startswith(result.text)
        return kept

    def _probe(self, conversation: Conversation) -> None:
        probe = self.engine.generate(tokens=conversation.log, sampling=PROBE)
        assert list(probe.tokens) == self.oracle(conversation.log)
        written = min(conversation.ends[-1][1], len(conversation.log) - 1)
        assert probe.cache.cached_tokens >= written // self.block_size * self.block_size


def _how(result: TurnResult | None) -> str:
    """In what way a turn ended."""
    if result is None:
        return "dropped"
    if result.finish_reason is not FinishReason.STOP:
        return result.finish_reason.value
    return {str: "stop string", int: "stop id"}.get(type(result.stop), "end token")


_LONGEST = 8
"""Tokens of one character, or of one stop string's beginning."""
