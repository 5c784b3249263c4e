"""Matrix products with a fixed fp32 weight on the CPU, for any number of rows.

Two ways. oneDNN's blocked layout serves everywhere. On AMD processors the BLAS that numpy brings,
usually OpenBLAS, reads a weight at memory speed for one row, up to twice as fast; on Intel's it
gains little. Its threads and torch's must not fight for the cores: where torch's wait by spinning,
which is their default, one row takes ten times as long.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

_HAS_ONEDNN: bool = torch._C._has_mkldnn
if _HAS_ONEDNN:  # the overloads themselves: finding one in each call takes as long as a short sum
    _product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    _sum: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.binary
# Rows that the layout is chosen for; the layout of this count serves every other as well.
_PACK_ROWS = 16


class Linear(Protocol):
    """``x @ weight.T + bias`` for fp32 ``x`` of shape ``[rows, in_features]``, contiguous."""

    @property
    def nbytes(self) -> int:
        """Memory of weight and bias."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """The product, ``[rows, out_features]``, a new tensor."""
        ...

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The product and ``other``, ``[rows, out_features]``, added; a new tensor."""
        ...


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A :class:`Linear` in oneDNN's blocked layout, where torch has oneDNN; else as torch does it.

    Attributes:
        weight: ``[out_features, in_features]``, opaque where it is blocked.
        bias: ``[out_features]`` or None.
        nbytes: Memory of weight and bias.
    """

    weight: Tensor
    bias: Tensor | None
    nbytes: int

    @classmethod
    def make(cls, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Copy a row-major weight ``[out_features, in_features]`` into the layout."""
        nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
        weight = weight.contiguous()
        if _HAS_ONEDNN:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        return cls(weight, bias, nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """See :class:`Linear`."""
        if _HAS_ONEDNN:
            return _product(x, self.weight, self.bias, "none", [], "")
        return functional.linear(x, self.weight, self.bias)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """See :class:`Linear`; in one pass."""
        if _HAS_ONEDNN:
            return _sum(x, other, self.weight, self.bias, "add")
        return functional.linear(x, self.weight, self.bias) + other


@dataclass(frozen=True, slots=True)
class BlasLinear:
    """A :class:`Linear` that takes one row through numpy's BLAS, and more as :class:`PackedLinear`.

    It holds the weight twice: what is fast for one row makes the threads of two libraries fight
    over the cores for many.

    Attributes:
        row_weight: ``[in_features, out_features]``, so that one row is a sum of rows of the weight,
            which is read from front to back.
        packed: For more rows.
        nbytes: Memory of both.
    """

    row_weight: npt.NDArray[Any]
    packed: PackedLinear
    nbytes: int

    @classmethod
    def make(cls, weight: Tensor, bias: Tensor | None = None) -> BlasLinear:
        """Copy a row-major weight ``[out_features, in_features]``, once for each."""
        row_weight = np.ascontiguousarray(weight.numpy().T)
        packed = PackedLinear.make(weight, bias)
        return cls(row_weight, packed, row_weight.nbytes + packed.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """See :class:`Linear`."""
        if x.shape[0] > 1:
            return self.packed(x)
        product = torch.from_numpy(np.matmul(x.numpy(), self.row_weight))
        return product if self.packed.bias is None else product.add_(self.packed.bias)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """See :class:`Linear`."""
        return self.packed.plus(x, other) if x.shape[0] > 1 else self(x).add_(other)


def pack(weight: Tensor, bias: Tensor | None = None, *, blas: bool) -> Linear:
    """Copy a row-major fp32 weight ``[out_features, in_features]`` for one of the two ways."""
    return (BlasLinear if blas else PackedLinear).make(weight, bias)


def blas_is_faster(*, threads_wait_asleep: bool) -> bool:
    """Whether numpy's BLAS is the faster way: this is an AMD processor, and it is OpenBLAS.

    Args:
        threads_wait_asleep: Whether torch's threads do, and so leave the cores to others.
    """
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    return threads_wait_asleep and "openblas" in blas and "AuthenticAMD" in _processor()


def _processor() -> str:
    """What the system says of the first processor; nothing where it says it otherwise."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            return "".join(itertools.takewhile(str.strip, lines))
    except OSError:
        return ""
