from __future__ import annotations

import pytest
import torch

from sessionkv.kernels.logprobs import log_probabilities
from sessionkv.model import sampling as on_the_host


@pytest.mark.parametrize("count", [0, 1, 5, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_host(device: torch.device, dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    logits = (torch.randn(3, 60, generator=generator) * 4).to(dtype)
    logits[1, [50, 3, 17]] = logits[1].max() + 1
    logits[2, [8, 2]] = torch.tensor([-0.0, 0.0], dtype=dtype)
    token_ids = torch.tensor([59, 17, 0])
    ids, values = log_probabilities(logits.to(device), token_ids.to(device), count)
    for row in range(3):
        expected = on_the_host.log_probabilities(logits[row].float(), int(token_ids[row]), count)
        assert ids[row].tolist() == [item.token_id for item in expected]
        assert values[row].tolist() == pytest.approx([i.logprob for i in expected], abs=1e-5)
