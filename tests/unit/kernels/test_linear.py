from __future__ import annotations

import pytest
import torch

from sessionkv.kernels.linear import pack


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17, 64, 257])
def test_product_equals_float64(rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 96, generator=generator)
    weight = torch.randn(200, 96, generator=generator)
    offset = torch.randn(200, generator=generator) if bias else None
    linear = pack(weight, offset)
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    torch.testing.assert_close(linear(x).double(), expected, atol=1e-4, rtol=0)
    other = torch.randn(rows, 200, generator=generator)
    before = other.clone()
    torch.testing.assert_close(
        linear.plus(x, other).double(), expected + other.double(), atol=1e-4, rtol=0
    )
    assert torch.equal(other, before)
    assert linear.nbytes == (200 * 96 + (200 if bias else 0)) * 4
