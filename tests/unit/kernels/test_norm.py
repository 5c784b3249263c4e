from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm as torch_rms_norm

from sessionkv.kernels.norm import rms_norm


@pytest.mark.parametrize("shape", [(1, 576), (8, 576), (5, 3, 64)])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6], ids=["tiny", "usual", "large"])
def test_equals_float64(shape: tuple[int, ...], size: float) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(shape, generator=generator) * size
    before, weight = x.clone(), torch.randn(shape[-1], generator=generator)
    expected = torch_rms_norm(x.double(), shape[-1:], weight.double(), 1e-5)
    torch.testing.assert_close(rms_norm(weight, 1e-5)(x).double(), expected, atol=0, rtol=2e-6)
    assert torch.equal(x, before)


def test_strided_rows_and_zeros() -> None:
    heads = torch.randn(4, 5, 64)[:, 1:3]
    norm = rms_norm(torch.ones(64), 1e-6)
    assert torch.equal(norm(heads), norm(heads.contiguous()))
    assert torch.equal(norm(torch.zeros(2, 64)), torch.zeros(2, 64))
