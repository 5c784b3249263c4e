from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from sessionkv.kernels import linear as linear_module
from sessionkv.kernels.linear import BlasLinear, Linear, PackedLinear, pack


@pytest.mark.parametrize("make", [PackedLinear.make, BlasLinear.make])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17, 64, 257])
def test_product_equals_float64(make: Callable[..., Linear], rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 96, generator=generator)
    weight = torch.randn(200, 96, generator=generator)
    offset = torch.randn(200, generator=generator) if bias else None
    linear = make(weight, offset)
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    torch.testing.assert_close(linear(x).double(), expected, atol=1e-4, rtol=0)
    other = torch.randn(rows, 200, generator=generator)
    before = other.clone()
    torch.testing.assert_close(
        linear.plus(x, other).double(), expected + other.double(), atol=1e-4, rtol=0
    )
    assert torch.equal(other, before)
    copies = 2 if isinstance(linear, BlasLinear) else 1
    assert linear.nbytes == (copies * 200 * 96 + (200 if bias else 0)) * 4


@pytest.mark.parametrize(
    ("threads_wait_asleep", "processor", "is_faster"),
    [
        (True, "vendor_id : AuthenticAMD", True),
        (True, "vendor_id : GenuineIntel", False),
        (True, "", False),
        (False, "vendor_id : AuthenticAMD", False),
    ],
)
def test_numpys_blas_is_for_amd_where_threads_do_not_spin(
    monkeypatch: pytest.MonkeyPatch, threads_wait_asleep: bool, processor: str, is_faster: bool
) -> None:
    monkeypatch.setattr(linear_module, "_processor", lambda: processor)
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    found = linear_module.blas_is_faster(threads_wait_asleep=threads_wait_asleep)
    assert found == (is_faster and "openblas" in blas)


def test_either_way_can_be_asked_for() -> None:
    assert isinstance(pack(torch.ones(4, 4), blas=True), BlasLinear)
    assert isinstance(pack(torch.ones(4, 4), blas=False), PackedLinear)
