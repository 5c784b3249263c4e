from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from sessionkv.model.sampling import SamplerState, draw, log_probabilities, sample, uniform
from sessionkv.types import SamplingParams

VOCAB = 50
PINNED = [0.9587867103740684, 0.6934046604194692, 0.034212382650878115]


def logits(seed: int = 0, size: int = VOCAB) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2


def state(
    params: SamplingParams,
    token_ids: list[int] | None = None,
    *,
    num_prompt: int | None = None,
    stops: set[int] | None = None,
    vocab_size: int = VOCAB,
) -> SamplerState:
    ids = [3] if token_ids is None else token_ids
    return SamplerState(
        params,
        token_ids=ids,
        num_prompt_tokens=len(ids) if num_prompt is None else num_prompt,
        stop_token_ids=stops or set(),
        vocab_size=vocab_size,
    )


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals() -> None:
    row = torch.zeros(VOCAB)
    row[[9, 4, 30]] = 5.0
    assert sample(row, state(SamplingParams(temperature=0.0))).token_id == 4


def test_plain_greedy_is_recognised() -> None:
    assert state(SamplingParams(temperature=0.0)).is_plain_greedy
    for changed in (
        {"temperature": 1.0},
        {"temperature": 0.0, "logprobs": 0},
        {"temperature": 0.0, "logit_bias": {3: 1.0}},
        {"temperature": 0.0, "repetition_penalty": 1.1},
        {"temperature": 0.0, "presence_penalty": 0.1},
        {"temperature": 0.0, "frequency_penalty": 0.1},
        {"temperature": 0.0, "min_tokens": 1},
    ):
        assert not state(SamplingParams(**changed), stops={2}).is_plain_greedy


def test_repetition_sees_prompt_and_output_the_others_output_only() -> None:
    row = torch.tensor([2.0, -2.0, 1.0, 1.0, 1.0] + [0.0] * (VOCAB - 5))
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5, temperature=0.0
    )
    processed = state(params, [0, 1, 2, 2, 3], num_prompt=2).process(row)
    assert processed[0] == 1.0  # prompt, positive: divided
    assert processed[1] == -4.0  # prompt, negative: multiplied
    assert processed[2] == 0.5 - 2 * 0.5 - 0.25  # twice in the output
    assert processed[3] == 0.5 - 0.5 - 0.25
    assert processed[4] == 1.0  # never seen
    assert torch.equal(row[:3], torch.tensor([2.0, -2.0, 1.0]))  # the input is not changed


def test_appending_equals_starting_with_the_tokens() -> None:
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.1, frequency_penalty=1.0)
    grown = state(params, [7, 7])
    for token_id in (5, 5, 9):
        grown.append(token_id)
    resumed = state(params, [7, 7, 5, 5, 9], num_prompt=2)
    assert torch.equal(grown.process(logits()), resumed.process(logits()))
    assert grown.num_outputs == resumed.num_outputs == 3


def test_bias_is_added_and_ids_beyond_the_vocabulary_are_ignored() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={11: 100.0, VOCAB + 3: 50.0})
    assert sample(logits(), state(params)).token_id == 11


def test_stop_ids_are_masked_until_min_tokens() -> None:
    row = torch.zeros(VOCAB)
    row[2] = 9.0
    params = SamplingParams(temperature=0.0, min_tokens=2)
    sampler = state(params, stops={2, 7, VOCAB + 1})
    assert sample(row, sampler).token_id == 0
    sampler.append(0)
    assert sample(row, sampler).token_id == 0
    sampler.append(0)
    assert sample(row, sampler).token_id == 2


def test_ignore_eos_lifts_the_mask() -> None:
    row = torch.zeros(VOCAB)
    row[2] = 9.0
    params = SamplingParams(temperature=0.0, min_tokens=2, ignore_eos=True)
    assert sample(row, state(params, stops={2})).token_id == 2


def test_uniform_numbers_are_pinned() -> None:
    assert [uniform(11, i) for i in range(3)] == PINNED
    assert uniform(2**64 - 1, 0) != uniform(0, 0)
    numbers = [uniform(5, i) for i in range(4000)]
    assert all(0 <= n < 1 for n in numbers)
    assert abs(sum(numbers) / 4000 - 0.5) < 0.02
    assert len(set(numbers)) == 4000


def reference_probabilities(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Filters written out one by one over the sorted vocabulary."""
    scaled = row.double() / params.temperature
    order = sorted(range(len(row)), key=lambda i: (-float(scaled[i]), i))
    if params.top_k:
        order = order[: params.top_k]
    weights = [math.exp(float(scaled[i] - scaled[order[0]])) for i in order]
    kept, before, total = [], 0.0, sum(weights)
    for i, weight in zip(order, weights, strict=True):
        if before < params.top_p * total:
            kept.append((i, weight))
        before += weight
    kept = [(i, weight) for i, weight in kept if weight >= params.min_p]
    probabilities = torch.zeros(len(row), dtype=torch.float64)
    for i, weight in kept:
        probabilities[i] = weight / sum(w for _, w in kept)
    return probabilities


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.5, top_k=20, top_p=0.9, min_p=0.05),
        SamplingParams(top_k=1),
        SamplingParams(top_p=1e-9),
    ],
    ids=str,
)
def test_the_distribution_is_exact(params: SamplingParams) -> None:
    """Evenly spaced numbers hit each token in proportion to its probability."""
    row, count = logits(3), 5000
    found = Counter(draw(row, params, (i + 0.5) / count) for i in range(count))
    expected = reference_probabilities(row, params)
    for token_id in range(VOCAB):
        assert abs(found[token_id] / count - float(expected[token_id])) <= 1.0 / count


def test_top_k_of_equal_logits_keeps_the_lowest_ids() -> None:
    params = SamplingParams(top_k=3)
    found = {draw(torch.zeros(VOCAB), params, i / 100) for i in range(100)}
    assert found == {0, 1, 2}


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999999])
def test_a_nucleus_wider_than_the_first_look_is_right(top_p: float) -> None:
    row, params = torch.zeros(3000), SamplingParams(top_p=top_p)
    assert draw(row, params, 1 - 2**-53) == math.ceil(3000 * top_p) - 1


def test_the_last_number_never_falls_off_the_end() -> None:
    row = torch.full((VOCAB,), -1e30)
    row[17] = 0.0
    assert draw(row, SamplingParams(), 1 - 2**-53) == 17
    assert draw(row, SamplingParams(top_p=0.5), 1 - 2**-53) == 17
    assert draw(row, SamplingParams(temperature=1e-6), 0.0) == 17


def test_draws_depend_on_seed_and_index_only() -> None:
    params = SamplingParams(seed=11)

    def run(first: int) -> list[int]:
        ids = [3, *range(first)]
        sampler = state(params, ids, num_prompt=1)
        drawn = []
        for index in range(first, 20):
            drawn.append(sample(logits(index), sampler).token_id)
            sampler.append(drawn[-1])
        return drawn

    whole = run(0)
    assert run(5) == whole[5:]
    assert len(set(whole)) > 5
    other = SamplerState(
        SamplingParams(seed=12),
        token_ids=[3],
        num_prompt_tokens=1,
        stop_token_ids=set(),
        vocab_size=VOCAB,
    )
    assert [sample(logits(i), other).token_id for i in range(20)] != whole


def test_logprobs_are_of_the_raw_logits() -> None:
    row = logits(4)
    params = SamplingParams(temperature=0.0, logit_bias={11: 100.0}, logprobs=3)
    token = sample(row, state(params))
    expected = torch.log_softmax(row.double(), 0)
    best = sorted(range(VOCAB), key=lambda i: (-float(row[i]), i))[:3]
    assert token.token_id == 11
    assert [item.token_id for item in token.logprobs] == [11, *best]
    for item in token.logprobs:
        assert item.logprob == pytest.approx(float(expected[item.token_id]), abs=1e-12)


def test_logprobs_zero_gives_the_token_alone() -> None:
    assert [item.token_id for item in log_probabilities(logits(), 8, 0)] == [8]
