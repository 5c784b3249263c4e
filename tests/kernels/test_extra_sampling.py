from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from sessionkv.engine.gpu.results import FetchedResults, StepResults
from sessionkv.engine.gpu.sampling import ExtraSampling
from sessionkv.kernels.sampling import SamplingRows, sample_tokens
from sessionkv.model.sampling import SamplerState, sample
from sessionkv.types import SamplingParams, SequenceStart
from tests.builders.masks import packed

VOCAB = 70
STOPS = frozenset({11, 12, 10**6})
MANY = 18  # more than are worked on at once
PROMPT = [3, 3, 9, 40]
KINDS: list[dict[str, object]] = [
    {},
    {"logit_bias": {5: 4.5, 30: -3.0, 10**6: 1.0}},
    {"repetition_penalty": 1.6},
    {"presence_penalty": 1.2, "frequency_penalty": -0.7},
    {"min_tokens": 3, "logit_bias": {11: 50.0}},
    {"min_tokens": 3, "logit_bias": {11: 50.0}, "ignore_eos": True},
    {"logprobs": 0},
    {"logprobs": 20, "frequency_penalty": 1.0},
    {"logprobs": 3},
]


class Both:
    """The same sequences here and, one by one, as the CPU samples them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.extras = ExtraSampling(MANY, vocab_size=VOCAB, device=device)
        self.results = StepResults(
            MANY, max_rows=MANY, vocab_size=VOCAB, dtype=torch.bfloat16, device=device
        )
        self.states: dict[int, SamplerState] = {}
        self.generator = torch.Generator().manual_seed(5)

    def start(self, seq_id: int, params: SamplingParams, outputs: tuple[int, ...] = ()) -> None:
        token_ids = [*PROMPT, *outputs]
        self.extras.start(
            SequenceStart(seq_id, (), 0, token_ids, len(PROMPT), params, STOPS)
        )  # fmt: skip
        self.states[seq_id] = SamplerState(
            params,
            token_ids=token_ids,
            num_prompt_tokens=len(PROMPT),
            stop_token_ids=STOPS,
            vocab_size=VOCAB,
        )

    def end(self, seq_id: int) -> None:
        self.extras.end(seq_id)
        del self.states[seq_id]

    def step(self, *seq_ids: int, masks: dict[int, bytes] | None = None) -> FetchedResults:
        """Random logits for these rows; what was sampled has been compared."""
        masks = masks or {}
        logits = torch.randn(len(seq_ids), VOCAB, generator=self.generator) * 3
        logits = logits.bfloat16()
        states = [self.states[seq_id] for seq_id in seq_ids]
        extra = self.extras.prepare(seq_ids, masks)
        here = self.results.logits[: len(seq_ids)].copy_(logits)
        sampling = self._rows(states)
        self.results.begin()
        self.results.put_sampled(*sample_tokens(here, sampling))
        if extra is not None:
            self.extras.sample(extra, here, sampling=sampling, results=self.results)
        assert torch.equal(here.cpu(), logits)
        wanted = {} if extra is None else extra.num_likeliest
        fetched = self.results.send(1, num_samples=len(seq_ids), num_asked=len(wanted))()
        tokens = [
            sample(row.float(), state, masks.get(seq_id))
            for row, state, seq_id in zip(logits, states, seq_ids, strict=True)
        ]
        assert fetched.token_ids == [token.token_id for token in tokens]
        assert not any(fetched.bad)
        assert [*wanted] == [row for row, token in enumerate(tokens) if token.logprobs]
        for number, (row, count) in enumerate(wanted.items()):
            expected = tokens[row].logprobs
            assert count == len(expected) - 1
            ids = fetched.logprob_ids[number][: 1 + count]
            assert ids == [item.token_id for item in expected]
            values = fetched.logprobs[number][: 1 + count]
            assert values == pytest.approx([item.logprob for item in expected], abs=1e-5)
        for state, token in zip(states, tokens, strict=True):
            state.append(token.token_id)
        return fetched

    def _rows(self, states: list[SamplerState]) -> SamplingRows:
        params = [state.params for state in states]
        seeds = np.array([p.seed or 0 for p in params], np.uint64).astype(np.int64)
        columns = {
            "temperature": torch.tensor([p.temperature for p in params], dtype=torch.float32),
            "top_k": torch.tensor([p.top_k for p in params], dtype=torch.int32),
            "top_p": torch.tensor([p.top_p for p in params], dtype=torch.float32),
            "min_p": torch.tensor([p.min_p for p in params], dtype=torch.float32),
            "seed": torch.from_numpy(seeds),
            "index": torch.tensor([state.num_outputs for state in states]),
        }
        return SamplingRows(**{name: column.to(self.device) for name, column in columns.items()})


def params(kind: dict[str, object], number: int) -> SamplingParams:
    """A third is drawn, half of that from a filtered distribution."""
    if number % 3:
        return SamplingParams(temperature=0.0, **kind)
    return SamplingParams(temperature=1.5, seed=2**64 - number - 1, top_k=number % 2 * 9, **kind)


def test_rows_in_any_mixture_equal_the_host(device: torch.device) -> None:
    both, rng = Both(device), random.Random(3)
    for seq_id in range(MANY):
        outputs = (9, 5, 5, 69)[: rng.randrange(5)]
        both.start(seq_id, params(KINDS[seq_id % len(KINDS)], seq_id), outputs)
    order = list(range(MANY))
    both.step(*order)
    for _ in range(3):
        rng.shuffle(order)
        both.step(*order[:6])


def test_masks_decide_whatever_else_changes_a_row(device: torch.device) -> None:
    """New ones with each step, for some of the rows, and before ``min_tokens`` too."""
    both, rng = Both(device), random.Random(4)
    with_masks = set()
    for seq_id in range(MANY):
        kind = dict(KINDS[seq_id % len(KINDS)])
        if seq_id % 3 != 1 and not kind.get("ignore_eos"):
            kind["grammar"] = {"regex": "a"}
            with_masks.add(seq_id)
        both.start(seq_id, params(kind, seq_id))
    order = list(range(MANY))
    for count in (MANY, 5):
        rng.shuffle(order)
        rows = order[:count]
        masks = {
            seq_id: packed(rng.sample(range(VOCAB), rng.choice((1, 2, 40))), VOCAB)
            for seq_id in rows
            if seq_id in with_masks
        }
        found = both.step(*rows, masks=masks).token_ids
        for seq_id, token_id in zip(rows, found, strict=True):
            if seq_id in masks:
                assert masks[seq_id][token_id // 8] >> token_id % 8 & 1


def test_what_is_uploaded_is_kept_while_it_stays_the_same(device: torch.device) -> None:
    both = Both(device)
    both.start(1, params({"min_tokens": 3, "presence_penalty": 1.0}, 1))
    both.start(2, SamplingParams(temperature=0.0))
    both.start(3, params({"logprobs": 2}, 3))

    def parts() -> tuple[object, ...]:
        extra = both.extras.prepare([1, 2, 3])
        assert extra is not None
        return tuple(extra.parts)

    first = parts()
    for _ in range(2):
        both.step(1, 2, 3)
        assert parts() == first
        assert parts()[0] is first[0]
    both.step(1, 2, 3)
    assert parts()[0] is not first[0]  # three were sampled: stops may come
    assert both.extras.prepare([2]).parts == []


def test_histories_are_given_back_and_start_clean(device: torch.device) -> None:
    both = Both(device)
    penalised = params({"repetition_penalty": 3.0, "frequency_penalty": 2.0}, 1)
    for round_number in range(2):
        for seq_id in range(MANY):
            both.start(round_number * MANY + seq_id, replace(penalised, logprobs=0))
        both.step(*(round_number * MANY + seq_id for seq_id in (0, 7, MANY - 1)))
        for seq_id in range(MANY):
            both.end(round_number * MANY + seq_id)
    assert both.extras.prepare([0]) is None
    # The same sequence starts anew in the middle of its life, with what it had sampled.
    both.start(99, penalised)
    sampled = [both.step(99).token_ids[0] for _ in range(3)]
    both.end(99)
    both.start(99, penalised, tuple(sampled))
    both.step(99)


def test_most_sequences_need_nothing(device: torch.device) -> None:
    both = Both(device)
    both.start(1, SamplingParams(temperature=1.0, seed=3, top_p=0.5, min_tokens=2, ignore_eos=True))
    both.start(2, SamplingParams(temperature=0.0, min_tokens=2), outputs=(4, 5))
    assert both.extras.prepare([1, 2]) is None
    both.step(1, 2)
    both.extras.end(77)  # not known, which is fine


def test_a_row_with_a_bad_number_stays_bad(device: torch.device) -> None:
    both = Both(device)
    both.start(1, params({"presence_penalty": 1.0, "logprobs": 1}, 1))
    extra = both.extras.prepare([1])
    logits = both.results.logits[:1].fill_(float("nan"))
    sampling = both._rows([both.states[1]])
    both.results.begin()
    both.results.put_sampled(*sample_tokens(logits, sampling))
    both.extras.sample(extra, logits, sampling=sampling, results=both.results)
    assert both.results.send(1, num_samples=1, num_asked=1)().bad == [1]
