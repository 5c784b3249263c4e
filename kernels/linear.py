"""Matrix products with a fixed weight on the CPU: packed once, fast for any number of rows.

oneDNN's blocked layout reads a weight at memory speed from 1 to about 16 rows, where a plain
row-major product takes up to 3 times as long, and is no slower for hundreds of rows. It needs a
torch that is built with oneDNN; elsewhere :func:`pack` keeps the weight as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_HAS_ONEDNN: bool = torch._C._has_mkldnn
if _HAS_ONEDNN:  # the overloads themselves: finding one in each call takes as long as a short sum
    _product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    _sum: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.binary
# Rows that the layout is chosen for; the layout of this count serves every other as well.
_PACK_ROWS = 16


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """``x @ weight.T + bias`` for fp32 ``x`` of shape ``[rows, in_features]``.

    Attributes:
        weight: ``[out_features, in_features]``, opaque when ``packed``.
        bias: ``[out_features]`` or None.
        packed: Whether the weight is in oneDNN's layout.
        nbytes: Memory of weight and bias.
    """

    weight: Tensor
    bias: Tensor | None
    packed: bool
    nbytes: int

    def __call__(self, x: Tensor) -> Tensor:
        """The product, ``[rows, out_features]``, a new tensor. ``x`` must be contiguous."""
        if self.packed:
            return _product(x, self.weight, self.bias, "none", [], "")
        return functional.linear(x, self.weight, self.bias)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The product and ``other``, ``[rows, out_features]``, added in one pass; a new tensor."""
        if self.packed:
            return _sum(x, other, self.weight, self.bias, "add")
        return functional.linear(x, self.weight, self.bias) + other


def pack(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Copy a row-major fp32 weight ``[out_features, in_features]`` into the fast layout."""
    nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
    if _HAS_ONEDNN:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        return PackedLinear(packed, bias, packed=True, nbytes=nbytes)
    return PackedLinear(weight.contiguous(), bias, packed=False, nbytes=nbytes)
