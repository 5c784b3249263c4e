"""Launches over logits stay inside what they were given, like those of `test_bounds.py`."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from sessionkv.kernels import philox, sampling
from sessionkv.kernels import reference_pointwise as reference
from sessionkv.kernels.logit_changes import add_at, count_tokens, penalise
from sessionkv.kernels.logprobs import log_probabilities
from sessionkv.kernels.sampling import SamplingRows, sample_tokens
from tests.builders.guarded import Guarded

# Temperature, top-k, top-p, min-p: greedy, plain, each filter alone, all of them.
FILTERS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (2.0, 20, 1.0, 0.0),
    (2.0, 0, 0.95, 0.0),
    (1.0, 0, 1.0, 0.05),
    (1.5, 30, 0.8, 0.02),
]


@pytest.fixture
def memory(device: torch.device) -> Guarded:
    return Guarded(device)


def random_logits(rows: int, vocab_size: int) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3


def sampling_rows(memory: Guarded) -> SamplingRows:
    """Seeds from 5 on, indices from 0 on; a row's parameters at no aligned address."""
    temperature, top_k, top_p, min_p = zip(*FILTERS, strict=True)
    count = len(FILTERS)
    values = (
        torch.tensor(temperature), torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p),
        torch.tensor(min_p), torch.arange(5, 5 + count), torch.arange(count),
    )  # fmt: skip
    names = (field.name for field in fields(SamplingRows))
    return SamplingRows(
        **{name: memory.given(v, shift=1) for name, v in zip(names, values, strict=True)}
    )


def expected_token(logits: Tensor, row: int) -> int:
    temperature, top_k, top_p, min_p = FILTERS[row]
    if temperature == 0:
        return int(logits.argmax())
    weights = reference.kept_weights(
        logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    return reference.choose(weights, philox.random_bits(5 + row, row) * 2.0**-53)


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "candidates"),
    [
        (1, torch.float32, 1024),
        (256, torch.bfloat16, 1024),
        (257, torch.float32, 2),
        pytest.param(151_937, torch.bfloat16, 1024, marks=pytest.mark.gpu),
    ],
)
def test_sample_tokens(
    memory: Guarded,
    monkeypatch: pytest.MonkeyPatch,
    vocab_size: int,
    dtype: torch.dtype,
    candidates: int,
) -> None:
    """Whether tokens that may be kept fit among the candidates or not."""
    monkeypatch.setattr(sampling, "CANDIDATES", candidates)
    logits = random_logits(len(FILTERS), vocab_size).to(dtype)
    given, rows = memory.given(logits), sampling_rows(memory)
    token_ids, unusable = memory.run(sample_tokens, given, rows)
    wanted = [expected_token(logits[row].float(), row) for row in range(len(FILTERS))]
    assert token_ids.tolist() == wanted
    assert not unusable.any()


def test_rows_that_are_unusable(memory: Guarded) -> None:
    logits = torch.full((len(FILTERS), 300), float("nan"))
    logits[1] = float("-inf")
    token_ids, unusable = memory.run(sample_tokens, memory.given(logits), sampling_rows(memory))
    assert token_ids.tolist() == [0] * len(FILTERS)
    assert unusable.all()


@pytest.mark.parametrize("count", [0, 1, 70])
def test_log_probabilities(memory: Guarded, count: int) -> None:
    logits = random_logits(3, 70)
    given, chosen = memory.given(logits), memory.given(torch.tensor([0, 69, 5]))
    ids, values = memory.run(log_probabilities, given, chosen, count)
    wanted = logits.log_softmax(1).to(values.device)
    assert (
        ids.tolist() == torch.cat([chosen.cpu()[:, None], logits.topk(count).indices], 1).tolist()
    )
    torch.testing.assert_close(values, wanted.gather(1, ids))


@pytest.mark.parametrize(("vocab_size", "entries"), [(5, 1), (2049, 129)])
def test_changes_of_logits(memory: Guarded, vocab_size: int, entries: int) -> None:
    """Rows and tokens at the ends; padding names ids that are in no vocabulary."""
    raw = random_logits(3, vocab_size)
    logits = memory.written(raw)
    rows = torch.full((entries,), -1, dtype=torch.int32)
    ids = torch.full((entries,), 2**60)
    rows[0], ids[0] = 0, 0
    rows[-1], ids[-1] = 2, vocab_size - 1
    memory.run(
        add_at,
        logits,
        rows=memory.given(rows, shift=1),
        token_ids=memory.given(ids, shift=1),
        values=memory.given(torch.full((entries,), 2.5), shift=1),
    )
    wanted = raw.clone()
    for row, token in {(int(rows[i]), int(ids[i])) for i in (0, -1)}:
        wanted[row, token] += 2.5
    assert torch.equal(logits.cpu(), wanted)

    seen = torch.zeros((4, vocab_size), dtype=torch.int32)
    seen[3, [0, -1]] = 4  # twice in the output
    history_rows = memory.given(torch.tensor([-1, 3, -1], dtype=torch.int32), shift=1)
    factors = {"repetition": 1.0, "presence": 0.5, "frequency": 0.25}
    given = {name: memory.given(torch.full((3,), v), shift=1) for name, v in factors.items()}
    memory.run(penalise, logits, memory.given(seen), history_rows=history_rows, **given)
    wanted[1, [0, -1]] -= 1.0
    torch.testing.assert_close(logits.cpu(), wanted)


@pytest.mark.parametrize("count", [2, 129])
def test_counted_tokens(memory: Guarded, count: int) -> None:
    history = memory.written(torch.zeros((3, 70), dtype=torch.int32))
    rows = torch.full((count,), -1, dtype=torch.int32)
    ids = torch.full((count,), -(2**60))
    rows[0], ids[0] = 0, 0
    rows[-1], ids[-1] = 2, 69
    given = {"history_rows": memory.given(rows, shift=1), "token_ids": memory.given(ids, shift=1)}
    memory.run(count_tokens, history, **given)
    assert history.nonzero().tolist() == [[0, 0], [2, 69]]
    assert int(history.sum()) == 4
