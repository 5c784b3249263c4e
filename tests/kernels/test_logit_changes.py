from __future__ import annotations

import numpy as np
import pytest
import torch

from sessionkv.kernels.logit_changes import (
    add_at,
    count_tokens,
    mask_tokens,
    penalise,
    start_history,
)
from sessionkv.model.sampling import SamplerState
from sessionkv.types import SamplingParams
from tests.builders.masks import packed

VOCAB = 70
PROMPT = [3, 3, 9, 40]
OUTPUTS = [9, 5, 5, 69]


def random_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows)) * 2


def state(params: SamplingParams, outputs: list[int]) -> SamplerState:
    return SamplerState(
        params,
        token_ids=[*PROMPT, *outputs],
        num_prompt_tokens=len(PROMPT),
        stop_token_ids={11, 12},
        vocab_size=VOCAB,
    )


def penalties(params: list[SamplingParams], device: torch.device) -> dict[str, torch.Tensor]:
    return {
        name: torch.tensor([getattr(p, f"{name}_penalty") for p in params], device=device)
        for name in ("repetition", "presence", "frequency")
    }


def test_all_changes_together_equal_the_host(device: torch.device) -> None:
    params = [
        SamplingParams(
            logit_bias={5: 2.5, 30: -1.0},
            repetition_penalty=1.3,
            presence_penalty=0.4,
            frequency_penalty=0.7,
            min_tokens=9,
        ),
        SamplingParams(),
        SamplingParams(repetition_penalty=0.5),
        SamplingParams(presence_penalty=-1.0, frequency_penalty=-0.25),
    ]
    history = torch.full((5, VOCAB), 99, dtype=torch.int32, device=device)
    for row in (4, 0, 2):
        start_history(history, row, prompt=PROMPT, outputs=OUTPUTS)
    raw = random_logits(4)
    logits = raw.to(device, copy=True)
    add_at(
        logits,
        rows=torch.tensor([0, -1, 0], dtype=torch.int32, device=device),
        token_ids=torch.tensor([5, 10**6, 30], device=device),
        values=torch.tensor([2.5, 1.0, -1.0], device=device),
    )
    penalise(
        logits,
        history,
        history_rows=torch.tensor([4, -1, 0, 2], dtype=torch.int32, device=device),
        **penalties(params, device),
    )
    add_at(
        logits,
        rows=torch.tensor([0, 0], dtype=torch.int32, device=device),
        token_ids=torch.tensor([11, 12], device=device),
        values=torch.full((2,), float("-inf"), device=device),
    )
    changed = logits.cpu()
    for row, row_params in enumerate(params):
        expected = state(row_params, OUTPUTS).process(raw[row])
        torch.testing.assert_close(changed[row], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(changed[1], raw[1])
    unseen = [i for i in range(VOCAB) if i not in {*PROMPT, *OUTPUTS}]
    assert torch.equal(changed[2:, unseen], raw[2:, unseen])
    assert bool((history[[1, 3]] == 99).all())


@pytest.mark.parametrize("vocab_size", [70, 4096, 4500])
def test_masks_rule_out_all_but_their_tokens(vocab_size: int, device: torch.device) -> None:
    some = [[0], [31, 32, vocab_size - 1], range(vocab_size), range(1, vocab_size, 3)]
    words = [np.frombuffer(packed(allowed, vocab_size), np.int32) for allowed in some]
    masks = torch.from_numpy(np.stack(words)).to(device)
    order = [2, -1, 1, 0, 3, 1]
    raw = torch.randn(len(order), vocab_size)
    raw[2, 32] = float("-inf")  # also what was ruled out before
    logits = raw.to(device, copy=True)
    mask_tokens(logits, masks, mask_rows=torch.tensor(order, dtype=torch.int32, device=device))
    expected = raw.clone()
    for row, mask in enumerate(order):
        if mask >= 0:
            ruled_out = sorted({*range(vocab_size)} - {*some[mask]})
            expected[row, ruled_out] = float("-inf")
    assert torch.equal(logits.cpu(), expected)


def test_counting_equals_starting_with_the_tokens(device: torch.device) -> None:
    history = torch.zeros((3, VOCAB), dtype=torch.int32, device=device)
    start_history(history, 0, prompt=PROMPT, outputs=[])
    rows = torch.tensor([-1, 0, -1], dtype=torch.int32, device=device)
    for token_id in OUTPUTS:
        sampled = torch.tensor([1, token_id, 2], device=device)
        count_tokens(history, history_rows=rows, token_ids=sampled)
    start_history(history, 2, prompt=PROMPT, outputs=OUTPUTS)
    assert torch.equal(history[0], history[2])
    assert not history[1].any()
    assert history[0, [3, 9, 5, 69, 0]].tolist() == [1, 3, 4, 2, 0]


def test_nothing_to_change(device: torch.device) -> None:
    logits = random_logits(2).to(device, copy=True)
    none = torch.zeros(0, dtype=torch.int32, device=device)
    add_at(logits, rows=none, token_ids=none.long(), values=none.float())
    masks = torch.zeros((1, 3), dtype=torch.int32, device=device)
    mask_tokens(logits, masks, mask_rows=torch.full_like(masks[0, :2], -1))
    mask_tokens(logits[:0], masks, mask_rows=none)
    count_tokens(none.view(0, VOCAB), history_rows=none, token_ids=none.long())
    assert torch.equal(logits.cpu(), random_logits(2))


def test_wrong_arguments() -> None:
    logits, rows = random_logits(2), torch.zeros(2, dtype=torch.int32)
    history = torch.zeros((1, VOCAB), dtype=torch.int32)
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match=r"logits is torch\.float16, not torch\.float32"):
        add_at(logits.half(), rows=rows, token_ids=rows.long(), values=rows.float())
    with pytest.raises(ValueError, match=r"token_ids has shape \[1\], not \[2\]"):
        add_at(logits, rows=rows, token_ids=rows[:1].long(), values=rows.float())
    with pytest.raises(ValueError, match=r"presence has shape \[1\], not \[2\]"):
        penalise(
            logits,
            history,
            history_rows=rows,
            **penalties([SamplingParams()] * 2, cpu) | {"presence": torch.zeros(1)},
        )
    with pytest.raises(ValueError, match=r"history has shape \[1, 70\], not \[any, 60\]"):
        penalise(
            logits[:, :60].contiguous(),
            history,
            history_rows=rows,
            **penalties([SamplingParams()] * 2, cpu),
        )
    with pytest.raises(ValueError, match=r"masks has shape \[2, 2\], not \[any, 3\]"):
        mask_tokens(logits, rows.repeat(2, 1), mask_rows=rows)
    with pytest.raises(ValueError, match=r"mask_rows has shape \[1\], not \[2\]"):
        mask_tokens(logits, rows.new_zeros(2, 3), mask_rows=rows[:1])
    with pytest.raises(ValueError, match="history_rows is torch"):
        count_tokens(history, history_rows=rows.long(), token_ids=rows.long())
