from __future__ import annotations

import pytest
import torch

from sessionkv.kernels import reference_pointwise as reference
from sessionkv.kernels.fused_norm import add_rms_norm, rms_norm

EPS = 1e-5
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def rows(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance / 4)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [64, 80, 1536])
def test_equals_the_reference(device: torch.device, dtype: torch.dtype, width: int) -> None:
    x, weight = rows((3, width), dtype), rows((width,), dtype, 1)
    given = x.to(device)
    assert_near(rms_norm(given, weight.to(device), EPS), reference.rms_norm(x, weight, EPS))
    assert torch.equal(given.cpu(), x)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_adds_to_the_residual_and_normalises_what_it_stored(
    device: torch.device, dtype: torch.dtype
) -> None:
    x, stream, weight = rows((3, 80), dtype), rows((5, 80), dtype, 1), rows((80,), dtype, 2)
    given, residual = x.to(device), stream.to(device, copy=True)
    normalised = add_rms_norm(given, residual[1:4], weight.to(device), EPS)
    assert_near(residual[1:4], (x.float() + stream[1:4].float()).to(dtype))
    assert_near(normalised, reference.rms_norm(residual[1:4].cpu(), weight, EPS))
    assert torch.equal(residual[[0, 4]].cpu(), stream[[0, 4]])
    assert torch.equal(given.cpu(), x)


def test_without_a_residual_the_input_is_the_stream(device: torch.device) -> None:
    x, weight = rows((2, 64), torch.float32).to(device), rows((64,), torch.float32, 1).to(device)
    assert torch.equal(add_rms_norm(x, None, weight, EPS), rms_norm(x, weight, EPS))


def test_zeros_and_large_values_stay_finite(device: torch.device) -> None:
    x = torch.tensor([[0.0] * 64, [60000.0] * 64], dtype=torch.float16, device=device)
    normalised = rms_norm(x, torch.ones(64, dtype=torch.float16, device=device), EPS)
    assert torch.equal(normalised.cpu(), torch.tensor([[0.0] * 64, [1.0] * 64]).half())


def test_no_rows(device: torch.device) -> None:
    assert rms_norm(torch.ones(0, 64, device=device), torch.ones(64, device=device), EPS).shape == (
        0,
        64,
    )


@pytest.mark.parametrize(
    ("x", "residual", "weight", "message"),
    [
        (torch.ones(2, 8), None, torch.ones(4), r"weight has shape \[4\], not \[8\]"),
        (torch.ones(8), None, torch.ones(8), r"x has shape \[8\], not \[any, any\]"),
        (torch.ones(2, 8), torch.ones(3, 8), torch.ones(8), r"residual has shape \[3, 8\]"),
        (torch.ones(2, 8), torch.ones(2, 8).half(), torch.ones(8), "residual is torch.float16"),
        (torch.ones(2, 8).int(), None, torch.ones(8), "x is torch.int32"),
        (torch.ones(8, 2).t(), None, torch.ones(8), "must be contiguous"),
        (torch.ones(1, 16_385), None, torch.ones(16_385), "above 16384"),
        (torch.ones(2, 8), None, torch.ones(8, device="meta"), "weight is on meta, not on cpu"),
    ],
)
def test_wrong_arguments(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        add_rms_norm(x, residual, weight, EPS)
