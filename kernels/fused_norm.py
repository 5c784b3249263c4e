"""RMS normalisation on the GPU, alone or in one pass with the residual sum before it.

One program a row: the row is read once and stays in registers. Sums are fp32; the residual sum is
rounded to its dtype before it is normalised, so that the stream and what is made of it agree.
Results are within one rounding of the output's dtype of an exact computation (fp32: 1e-5).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sessionkv.kernels.arguments import FLOATS, check_tensor
from sessionkv.kernels.early_launch import let_next_start, starts_early, wait_for_earlier

MAX_WIDTH = 16_384
"""A wider row would not fit into the registers of one program."""
_PER_WARP = 512  # 16 elements a thread: two loads of 16 bytes in flight for 16-bit rows
_MOST_WARPS = 16


@triton.jit
def _normalise_rows(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One row; without a residual that argument is None. ``WIDTH``: power of two from ``width``."""
    let_next_start(EARLY)
    column = tl.arange(0, WIDTH)
    inside = column < width
    weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_earlier(EARLY)
    at = tl.program_id(0).to(tl.int64) * width + column
    row = tl.load(x + at, mask=inside, other=0.0)
    if residual is not None:
        before = tl.load(residual + at, mask=inside, other=0.0)
        row = (row.to(tl.float32) + before.to(tl.float32)).to(before.dtype)
        tl.store(residual + at, row, mask=inside)
    values = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / width + eps)
    tl.store(out + at, (values * scale * weights).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension.

    Args:
        x: ``[rows, width]``, contiguous, bf16, fp16 or fp32; width up to :data:`MAX_WIDTH`.
        weight: ``[width]``, of any of these dtypes.
        eps: Added to the mean square.

    Returns:
        A new tensor like ``x``.
    """
    return _launch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add ``x`` to the residual stream, in place, and normalise the sum.

    Args:
        x: ``[rows, width]``, see :func:`rms_norm`; not changed.
        residual: Like ``x``; becomes the sum. None where there is no stream yet: ``x`` is it.
        weight: See :func:`rms_norm`.
        eps: See :func:`rms_norm`.

    Returns:
        The normalised sum, a new tensor like ``x``.
    """
    if residual is not None:
        check_tensor("residual", residual, x.shape, dtypes=(x.dtype,), like=x)
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    check_tensor("x", x, (None, None), dtypes=FLOATS, like=x)
    rows, width = x.shape
    check_tensor("weight", weight, (width,), dtypes=FLOATS, like=x)
    if width > MAX_WIDTH:
        raise ValueError(f"x has rows of {width}, above {MAX_WIDTH}")
    out = torch.empty_like(x)
    if rows:
        padded = triton.next_power_of_2(width)
        warps = min(_MOST_WARPS, max(1, padded // _PER_WARP))
        early = starts_early(x)
        _normalise_rows[(rows,)](
            x, residual, weight, out, width, eps, padded, early,
            num_warps=warps, launch_pdl=early,
        )  # fmt: skip
    return out
