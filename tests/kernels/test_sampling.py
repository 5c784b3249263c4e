from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
import triton
import triton.language as tl

from sessionkv.kernels import philox, sampling
from sessionkv.kernels import reference_pointwise as reference
from sessionkv.kernels.sampling import SamplingRows, sample_tokens
from sessionkv.kernels.sampling_random import below, random_bits
from sessionkv.model import sampling as on_the_host
from sessionkv.types import SamplingParams

VOCAB = 700  # three segments, the last one not full
GREEDY = SamplingParams(temperature=0.0)
MIXTURE = [
    GREEDY,
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(top_k=1),
    SamplingParams(top_k=20),
    SamplingParams(top_k=VOCAB),
    SamplingParams(temperature=2.0, top_k=300),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=3.0, top_p=0.99),
    SamplingParams(top_p=1e-9),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=1.5, top_k=40, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=1.5, top_p=0.7, min_p=0.3),
    SamplingParams(temperature=1e-6, top_p=0.5),
]


def random_logits(rows: int, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * 3


def rows_of(
    params: list[SamplingParams], device: torch.device, *, first_index: int = 0
) -> SamplingRows:
    """Seeds from 5 on, indices from ``first_index`` on."""
    count = len(params)

    def tensor(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return SamplingRows(
        temperature=tensor([p.temperature for p in params], torch.float32),
        top_k=tensor([p.top_k for p in params], torch.int32),
        top_p=tensor([p.top_p for p in params], torch.float32),
        min_p=tensor([p.min_p for p in params], torch.float32),
        seed=torch.arange(5, 5 + count, device=device),
        index=torch.arange(first_index, first_index + count, device=device),
    )


def take(rows: SamplingRows, indices: list[int]) -> SamplingRows:
    return SamplingRows(*(getattr(rows, field.name)[indices] for field in fields(rows)))


def expected_token(logits: torch.Tensor, params: SamplingParams, seed: int, index: int) -> int:
    if params.temperature == 0:
        return int((logits == logits.max()).nonzero()[0])
    weights = reference.kept_weights(
        logits,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
    )
    return reference.choose(weights, philox.random_bits(seed, index) * 2.0**-53)


@pytest.mark.parametrize(
    ("dtype", "mixture"),
    [(torch.float32, MIXTURE), (torch.bfloat16, [MIXTURE[i] for i in (0, 1, 4, 7, 10)])],
    ids=["fp32", "bf16"],
)
@pytest.mark.parametrize("candidates", [1024, 16])
def test_any_mixture_equals_the_reference_and_the_host(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    mixture: list[SamplingParams],
    candidates: int,
) -> None:
    """Whether tokens that may be kept fit into registers or not."""
    monkeypatch.setattr(sampling, "CANDIDATES", candidates)
    logits = random_logits(len(mixture)).to(dtype)
    token_ids, unusable = sample_tokens(logits.to(device), rows_of(mixture, device))
    for row, params in enumerate(mixture):
        values = logits[row].float()
        assert int(token_ids[row]) == expected_token(values, params, 5 + row, row), params
        if params.temperature:
            number = on_the_host.uniform(5 + row, row)
            assert int(token_ids[row]) == on_the_host.draw(values, params, number), params
    assert not unusable.any()


@pytest.mark.parametrize(
    ("params", "count"),
    [(SamplingParams(temperature=2.0), 20), (SamplingParams(temperature=2.0, min_p=0.1), 8)],
    ids=["plain", "min-p"],
)
def test_many_draws_from_one_row(device: torch.device, params: SamplingParams, count: int) -> None:
    logits = random_logits(1, 20, seed=3).expand(count, -1).contiguous()
    token_ids, _ = sample_tokens(logits.to(device), rows_of([params] * count, device))
    expected = [expected_token(logits[0], params, 5 + i, i) for i in range(count)]
    assert token_ids.tolist() == expected
    assert len(set(expected)) > 2


def test_more_segments_than_one_program_scans(device: torch.device) -> None:
    params = [GREEDY, SamplingParams(temperature=4.0), SamplingParams(top_k=30, temperature=4.0)]
    logits = random_logits(3, 4500, seed=1)
    token_ids, _ = sample_tokens(logits.to(device), rows_of(params, device))
    assert token_ids.tolist() == [
        expected_token(logits[i], p, 5 + i, i) for i, p in enumerate(params)
    ]


def test_greedy_ties_go_to_the_lowest_id(device: torch.device) -> None:
    logits = torch.full((3, VOCAB), -1.0)
    logits[0, [650, 300, 299]] = 5.0
    logits[1, 512], logits[1, 40] = -0.0, 0.0
    token_ids, _ = sample_tokens(logits.to(device), rows_of([GREEDY] * 3, device))
    assert token_ids.tolist() == [299, 40, 0]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), {3, 256}),
        (SamplingParams(top_k=3), {3, 256, 257}),
        (SamplingParams(top_p=0.3), {3, 256}),  # each has a quarter
        (SamplingParams(top_k=3, top_p=0.5), {3, 256}),  # each has a third
    ],
    ids=["top-k of 2", "top-k of 3", "top-p", "both"],
)
@pytest.mark.parametrize("candidates", [1024, 2])
def test_of_equals_the_lowest_ids_are_kept(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    params: SamplingParams,
    kept: set[int],
    candidates: int,
) -> None:
    monkeypatch.setattr(sampling, "CANDIDATES", candidates)
    assert philox.random_bits(11, 2) < 0.1 * 2**53
    assert philox.random_bits(11, 0) > 0.9 * 2**53
    rows = rows_of([params] * 2, device)
    rows.seed.fill_(11)
    rows.index.copy_(torch.tensor([2, 0]))
    logits = torch.full((2, VOCAB), float("-inf"))
    logits[:, [3, 256, 257, 600]] = -2.5
    token_ids, _ = sample_tokens(logits.to(device), rows)
    assert token_ids.tolist() == [min(kept), max(kept)]


def test_equal_zeros_of_either_sign_are_ties(device: torch.device) -> None:
    logits = torch.full((8, VOCAB), -100.0)
    logits[:, 5], logits[:, 6] = -0.0, 0.0
    token_ids, _ = sample_tokens(logits.to(device), rows_of([SamplingParams(top_k=1)] * 8, device))
    assert set(token_ids.tolist()) == {5}


def test_a_top_k_beyond_what_is_possible_draws_what_is(device: torch.device) -> None:
    params = SamplingParams(top_k=400, top_p=0.95)
    logits = torch.full((2, VOCAB), float("-inf"))
    logits[:, [9, 690]] = 1.0
    token_ids, unusable = sample_tokens(logits.to(device), rows_of([params] * 2, device))
    assert token_ids.tolist() == [expected_token(logits[i], params, 5 + i, i) for i in range(2)]
    assert not unusable.any()


def test_unusable_rows_are_flagged_and_harm_no_other(device: torch.device) -> None:
    params = [MIXTURE[i % len(MIXTURE)] for i in (0, 1, 10, 10, 0, 1, 2)]
    logits = random_logits(7)
    rows = rows_of(params, device)
    clean, _ = sample_tokens(logits.to(device), rows)
    broken = logits.clone()
    broken[1, 400], broken[2, 0] = float("nan"), float("nan")
    broken[4], broken[5, 699] = float("-inf"), float("inf")
    given = broken.to(device)
    token_ids, unusable = sample_tokens(given, rows)
    assert unusable.tolist() == [False, True, True, False, True, True, False]
    assert token_ids[[0, 3, 6]].tolist() == clean[[0, 3, 6]].tolist()
    assert token_ids[[1, 2, 4, 5]].tolist() == [0] * 4
    assert torch.equal(given.cpu().view(torch.int32), broken.view(torch.int32))


def test_a_row_does_not_depend_on_its_batch(device: torch.device) -> None:
    mixture = [MIXTURE[i] for i in (0, 1, 7, 10)]
    logits, rows = random_logits(len(mixture), seed=2).to(device), rows_of(mixture, device)
    together, _ = sample_tokens(logits, rows)
    for row in range(1, len(mixture)):
        alone, _ = sample_tokens(logits[row : row + 1], take(rows, [row]))
        assert int(alone) == int(together[row])


def test_draws_depend_on_seed_and_index_alone(device: torch.device) -> None:
    logits = random_logits(1).expand(4, -1).contiguous().to(device)
    rows = rows_of([SamplingParams(temperature=3.0)] * 4, device)
    rows = replace(
        rows,
        seed=torch.tensor([-1, -1, 2**40, 2**40], device=device),
        index=torch.tensor([7, 7, 7, 2**33], device=device),
    )
    first, second, third, fourth = sample_tokens(logits, rows)[0].tolist()
    assert first == second
    assert len({first, third, fourth}) == 3


@triton.jit
def _draws(
    seeds: tl.tensor, indices: tl.tensor, totals: tl.tensor, bits: tl.tensor, scaled: tl.tensor
) -> None:
    row = tl.program_id(0)
    drawn = random_bits(tl.load(seeds + row), tl.load(indices + row))
    tl.store(bits + row, drawn.to(tl.int64))
    tl.store(scaled + row, below(drawn, tl.load(totals + row)))


def test_the_device_draws_the_same_bits(device: torch.device) -> None:
    seeds = [0, 1, 2**64 - 1, 2**63, 0x0123456789ABCDEF]
    indices = [0, 2**32, 2**63 - 1, 5, 77]
    totals = [1, 2**62, 12345, 2**44, 2**53 + 1]
    signed = [seed - 2**64 if seed >= 2**63 else seed for seed in seeds]
    given = [torch.tensor(values, device=device) for values in (signed, indices, totals)]
    bits, scaled = torch.zeros_like(given[0]), torch.zeros_like(given[0])
    _draws[(5,)](*given, bits, scaled)
    expected = [philox.random_bits(s, i) for s, i in zip(seeds, indices, strict=True)]
    assert bits.tolist() == expected
    assert scaled.tolist() == [b * t >> 53 for b, t in zip(expected, totals, strict=True)]


def test_no_rows(device: torch.device) -> None:
    token_ids, unusable = sample_tokens(random_logits(0).to(device), rows_of([], device))
    assert token_ids.shape == unusable.shape == (0,)


def test_wrong_arguments() -> None:
    rows = rows_of([GREEDY], torch.device("cpu"))
    with pytest.raises(ValueError, match=r"temperature has shape \[1\], not \[2\]"):
        sample_tokens(random_logits(2), rows)
    with pytest.raises(ValueError, match=r"top_k is torch\.int64, not torch\.int32"):
        sample_tokens(random_logits(1), replace(rows, top_k=rows.top_k.long()))
    with pytest.raises(ValueError, match="of 262145 tokens, not of 1 to 262144"):
        sample_tokens(torch.zeros(1, 262_145), rows)
    with pytest.raises(ValueError, match="must be contiguous"):
        sample_tokens(random_logits(1)[:, :600:2], rows)
