from __future__ import annotations

import pytest
import torch

from sessionkv.kernels import reference_pointwise as reference
from sessionkv.kernels.silu_mul import silu_mul

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [48, 1100])
def test_equals_the_reference(device: torch.device, dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    gate_up = (torch.randn(3, 2 * width, generator=generator) * 4).to(dtype)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        silu_mul(gate_up.to(device)).cpu(),
        reference.silu_mul(gate_up),
        rtol=tolerance,
        atol=tolerance / 4,
    )


def test_far_negative_gates_close(device: torch.device) -> None:
    gate_up = torch.tensor([[-80.0, 0.0, 80.0, 3.0, 3.0, 3.0]], device=device)
    gated = silu_mul(gate_up).cpu()
    assert torch.allclose(gated, torch.tensor([[0.0, 0.0, 240.0]]), atol=1e-30)


def test_no_rows_and_no_halves(device: torch.device) -> None:
    assert silu_mul(torch.ones(0, 8, device=device)).shape == (0, 4)
    with pytest.raises(ValueError, match="rows of 7, which are not two halves"):
        silu_mul(torch.ones(1, 7, device=device))
