"""The gate of the MLP on the GPU: ``silu(gate) * up`` in one pass.

Arithmetic is fp32 with one rounding at the end (fp32: within 1e-6 of an exact result).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sessionkv.kernels.arguments import FLOATS, check_tensor

# 8 elements a thread are one load of 16 bytes each from gate and up; small tiles, so that even one
# row of a large model spreads over a dozen programs.
_TILE = 1024
_WARPS = 4


@triton.jit
def _gate(gate_up: tl.tensor, out: tl.tensor, width: tl.tensor, TILE: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    at = gate_up + row * 2 * width + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, gated.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``.

    Args:
        gate_up: ``[rows, 2 * width]``, each row the gate's half, then the other; contiguous; bf16,
            fp16 or fp32.

    Returns:
        ``[rows, width]``, new, in the same dtype.
    """
    check_tensor("gate_up", gate_up, (None, None), dtypes=FLOATS, like=gate_up)
    rows, both = gate_up.shape
    if both % 2:
        raise ValueError(f"gate_up has rows of {both}, which are not two halves")
    width = both // 2
    out = gate_up.new_empty((rows, width))
    if out.numel():
        _gate[(rows, triton.cdiv(width, _TILE))](gate_up, out, width, _TILE, num_warps=_WARPS)
    return out
