"""Plain references for pointwise kernels, copies and sampling: clear, slow and right.

Nothing here is used while serving. Sums are float64; results are rounded to the inputs' dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension."""
    exact = x.double()
    scale = (exact.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (exact * scale * weight.double()).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of the two halves of each row."""
    gate, up = gate_up.double().chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def rotate(heads: Tensor, cos_sin: Tensor) -> Tensor:
    """Turn pairs half a head apart.

    Args:
        heads: ``[num_tokens, num_heads, head_dim]`` float64.
        cos_sin: ``[num_tokens, head_dim]``: of each token's position, cosines, then sines.
    """
    first, second = heads.chunk(2, -1)
    cos, sin = cos_sin.double()[:, None].chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def rotate_and_store(
    qkv: Tensor,
    *,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    pool: Tensor,
    layer: int,
) -> Tensor:
    """See :func:`sessionkv.kernels.rotary_store.rotate_and_store`."""
    kv_heads, block_size = pool.shape[3:5]
    num_heads = qkv.shape[1] - 2 * kv_heads
    exact = qkv.double()
    queries, keys = exact[:, :num_heads], exact[:, num_heads : num_heads + kv_heads]
    values = exact[:, num_heads + kv_heads :]
    if q_norm is not None and k_norm is not None:
        queries, keys = rms_norm(queries, q_norm, eps), rms_norm(keys, k_norm, eps)
    rotations = cos_sin[positions]
    queries, keys = rotate(queries, rotations), rotate(keys, rotations)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            cell = pool[slot // block_size, layer, :, :, slot % block_size]
            cell[0], cell[1] = keys[token].to(pool.dtype), values[token].to(pool.dtype)
    return queries.to(qkv.dtype)


def copy_block_slots(pool: Tensor, copies: Sequence[Sequence[int]]) -> None:
    """Copy ``(src, dst, num_tokens)``: the first slots of one block to another, over all layers."""
    for src, dst, num_tokens in copies:
        pool[dst, ..., :num_tokens, :] = pool[src, ..., :num_tokens, :]


def kept_weights(
    logits: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """Weights that the filters leave, ``[vocab_size]`` float64; the likeliest token's is 1.

    Args:
        logits: ``[vocab_size]``.
        temperature: Above 0.
        top_k: Keep so many of the likeliest, of equals those with lower ids; 0 is off.
        top_p: Of those, keep the fewest likeliest with at least this part of their weight.
        min_p: Of those, keep what has at least this weight.
    """
    scaled = logits.double() / temperature
    falling = scaled.sort(descending=True, stable=True).indices
    if top_k:
        falling = falling[:top_k]
    weights = torch.exp(scaled[falling] - scaled.max())
    before = weights.cumsum(0) - weights
    kept = (before < top_p * weights.sum()) | (torch.arange(len(falling)) == 0)
    kept &= weights >= min_p
    result = torch.zeros_like(scaled)
    result[falling[kept]] = weights[kept]
    return result


def choose(weights: Tensor, number: float) -> int:
    """The first id at which the cumulative weight passes ``number``, in [0, 1), of the whole."""
    ends = weights.cumsum(0)
    return int((ends > number * ends[-1]).nonzero()[0])
