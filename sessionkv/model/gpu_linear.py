"""The products of a layer on a GPU: which of two ways each goes.

Few rows are bound by reading the weight, which own kernels do at memory speed; for more, and in
fp32, torch's library is faster.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sessionkv.kernels.silu_mul import silu_mul
from sessionkv.kernels.skinny_linear import HALVES, MAX_ROWS, skinny_gated_linear, skinny_linear


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: ``[rows, width]``, contiguous.
        weight: ``[columns, width]``, contiguous, of the dtype of ``x``.
        bias: ``[columns]`` or None; None where ``out`` is given.
        out: Where to write the result; contiguous.

    Returns:
        ``[rows, columns]``, ``out`` if given.
    """
    if _is_skinny(x):
        return skinny_linear(x, weight, bias, out=out)
    if out is not None:
        return torch.mm(x, weight.t(), out=out)
    return functional.linear(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``silu(gate) * up``, gate and up being the halves of ``x @ weight.T + bias``.

    Args:
        x: ``[rows, width]``, contiguous.
        weight: ``[2 * columns, width]``, contiguous, of the dtype of ``x``.
        bias: ``[2 * columns]`` or None.

    Returns:
        ``[rows, columns]``, new.
    """
    if _is_skinny(x):
        return skinny_gated_linear(x, weight, bias)
    return silu_mul(functional.linear(x, weight, bias))


def _is_skinny(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in HALVES and x.shape[0] <= MAX_ROWS
