"""Plain references that every faster way is tested against: clear, slow and right.

Nothing here is used while serving.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def paged_attention(
    queries: Tensor,
    pool: Tensor,
    layer: int,
    *,
    block_table: Sequence[int],
    start: int,
    window: int | None = None,
) -> Tensor:
    """Causal attention of new tokens of one sequence over its blocks, in float64.

    Query i stands at position ``start + i`` and sees positions up to its own, at most ``window``
    of them. Heads are grouped: query head h reads key head ``h // (num_heads // kv_heads)``.

    Args:
        queries: ``[num_tokens, num_heads, head_dim]``.
        pool: ``[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]``; holds the keys and
            values of all positions, the new ones included.
        layer: Index of the layer.
        block_table: Block ids of the sequence, in order.
        start: Position of the first query.
        window: Positions a query sees at most, itself included; None is all.

    Returns:
        ``[num_tokens, num_heads, head_dim]`` in the dtype of ``queries``.
    """
    kv_heads, block_size, head_dim = pool.shape[3:]
    group = queries.shape[1] // kv_heads
    out = torch.empty_like(queries)
    for i in range(queries.shape[0]):
        last = start + i
        first = 0 if window is None else max(0, last + 1 - window)
        cells = [(block_table[p // block_size], p % block_size) for p in range(first, last + 1)]
        for head in range(queries.shape[1]):
            keys = torch.stack([pool[b, layer, 0, head // group, s] for b, s in cells]).double()
            values = torch.stack([pool[b, layer, 1, head // group, s] for b, s in cells]).double()
            scores = keys @ queries[i, head].double() / head_dim**0.5
            out[i, head] = (torch.softmax(scores, 0) @ values).to(queries.dtype)
    return out
