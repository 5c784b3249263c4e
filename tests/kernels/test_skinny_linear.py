"""Products of few rows against float64, on whatever the kernels run on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sessionkv.kernels.skinny_linear import (
    ProductTile,
    choose_tile,
    skinny_gated_linear,
    skinny_linear,
)
from sessionkv.model.gpu_linear import gated_linear, linear

HALF = torch.float16
BOUND = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def randn(*shape: int, dtype: torch.dtype, device: torch.device | str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


def assert_near(found: Tensor, wanted: Tensor) -> None:
    bound = BOUND[found.dtype]
    torch.testing.assert_close(found.double(), wanted, atol=bound, rtol=bound)


@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize(
    ("columns", "width"), [(32, 64), (37, 80), (3, 300), (70, 17)], ids=lambda n: str(n)
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_any_shape(
    device: torch.device, rows: int, columns: int, width: int, has_bias: bool
) -> None:
    like = {"dtype": HALF, "device": device}
    x = randn(rows, width, **like, seed=0)
    weight = randn(2 * columns, width, **like, seed=1) / width**0.5
    bias = randn(2 * columns, **like, seed=2) if has_bias else None
    wanted = exact(x, weight, bias)
    assert_near(skinny_linear(x, weight, bias), wanted)
    gate, up = wanted.chunk(2, 1)
    assert_near(skinny_gated_linear(x, weight, bias), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("rows", [1, 5])
def test_tiles_smaller_than_the_weight(device: torch.device, rows: int) -> None:
    like = {"dtype": HALF, "device": device}
    x, weight = randn(rows, 100, **like, seed=3), randn(50, 100, **like, seed=4) / 10
    tile = ProductTile(16, 32, num_warps=4, num_stages=2)
    assert_near(skinny_linear(x, weight, tile=tile), exact(x, weight, None))
    gate, up = exact(x, weight, None).chunk(2, 1)
    found = skinny_gated_linear(x, weight, tile=tile)
    assert_near(found, torch.nn.functional.silu(gate) * up)


def test_the_result_goes_where_it_is_wanted_and_nowhere_else(device: torch.device) -> None:
    like = {"dtype": HALF, "device": device}
    x, weight = randn(3, 48, **like, seed=5), randn(20, 48, **like, seed=6)
    memory = torch.full((5, 20), 7.0, **like)
    assert skinny_linear(x, weight, out=memory[1:4]).data_ptr() == memory[1:].data_ptr()
    assert torch.equal(memory[1:4], skinny_linear(x, weight))
    assert (memory[[0, 4]] == 7.0).all()


def test_a_bad_row_harms_no_other(device: torch.device) -> None:
    like = {"dtype": HALF, "device": device}
    x, weight = randn(3, 48, **like, seed=5), randn(20, 48, **like, seed=6)
    clean = skinny_linear(x, weight)
    x[1] = torch.nan
    found = skinny_linear(x, weight)
    assert torch.equal(found[[0, 2]], clean[[0, 2]])
    assert found[1].isnan().all()


def test_no_rows(device: torch.device) -> None:
    like = {"dtype": HALF, "device": device}
    assert skinny_linear(torch.empty(0, 48, **like), torch.empty(20, 48, **like)).shape == (0, 20)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17])
@pytest.mark.parametrize(
    ("columns", "width"),
    [(6144, 4096), (4096, 12_288), (1024, 2048), (6144, 1024), (1024, 3072), (9728, 2560)],
)
def test_shapes_of_models_natively(dtype: torch.dtype, rows: int, columns: int, width: int) -> None:
    like = {"dtype": dtype, "device": "cuda"}
    x, weight = randn(rows, width, **like, seed=0), randn(columns, width, **like, seed=1)
    weight /= width**0.5
    wanted = exact(x, weight, None)
    assert_near(linear(x, weight), wanted)
    assert_near(linear(x, weight, out=torch.empty(rows, columns, **like)), wanted)
    gate, up = wanted.chunk(2, 1)
    # More rows than one tile: gate and up are rounded in between.
    found, product = gated_linear(x, weight, None).double(), torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(found, product, atol=4e-2, rtol=4e-2)


def test_tiles_are_no_deeper_than_rows() -> None:
    assert choose_tile(1, 4096, 576).depth == 1024
    assert choose_tile(8, 4096, 48).depth == 64


def test_fp32_and_many_rows_are_torchs() -> None:
    x, weight, bias = torch.randn(20, 8), torch.randn(6, 8), torch.randn(6)
    assert torch.equal(linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
    out = torch.empty(20, 6)
    assert linear(x, weight, out=out) is out
    gate, up = (x @ weight.T + bias).chunk(2, 1)
    wanted = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(gated_linear(x, weight, bias), wanted)


def test_wrong_arguments() -> None:
    x, weight = torch.zeros(2, 16, dtype=HALF), torch.zeros(6, 16, dtype=HALF)
    with pytest.raises(ValueError, match="x has 17 rows, above 16"):
        skinny_linear(torch.zeros(17, 16, dtype=HALF), weight)
    with pytest.raises(ValueError, match=r"weight has shape \[6, 16\], not \[any, 8\]"):
        skinny_linear(x[:, :8].contiguous(), weight)
    with pytest.raises(ValueError, match=r"x is torch\.float32"):
        skinny_linear(x.float(), weight.float())
    with pytest.raises(ValueError, match="weight has 5 rows, which are not two halves"):
        skinny_gated_linear(x, weight[:5])
