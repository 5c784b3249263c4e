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


def ragged_attention(
    queries: Tensor,
    pool: Tensor,
    layer: int,
    *,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of a ragged batch in float64, a sequence at a time.

    Positions that no query of a sequence sees are not read.

    Args:
        queries: ``[num_tokens, num_heads, head_dim]``: new tokens, one sequence after another.
        pool: As in :func:`paged_attention`.
        layer: Index of the layer.
        block_tables: ``[num_seqs, max_blocks]``.
        query_starts: ``[num_seqs + 1]``: where each sequence's rows start, and the last one's end.
        seq_lens: ``[num_seqs]``: positions of each sequence, its new ones included.
        window: Positions a query sees at most, itself included; None is all.

    Returns:
        ``[num_tokens, num_heads, head_dim]`` and the natural logarithms of the sums of
        exponentials, ``[num_tokens, num_heads]``, both float64; zeros and -inf for rows of no
        sequence.
    """
    kv_heads, block_size, head_dim = pool.shape[3:]
    group = queries.shape[1] // kv_heads
    out = torch.zeros(queries.shape, dtype=torch.float64, device=pool.device)
    log_sums = torch.full(queries.shape[:2], -torch.inf, dtype=torch.float64, device=pool.device)
    starts = query_starts.tolist()
    for seq, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        first_query = length - (rows.stop - rows.start)
        first = 0 if window is None else max(0, first_query + 1 - window)
        seen = torch.arange(first, length, device=pool.device)
        blocks = block_tables[seq, seen // block_size].long()
        keys, values = pool[blocks, layer, :, :, seen % block_size].double().unbind(1)
        at = torch.arange(first_query, length, device=pool.device)[:, None]
        hidden = seen > at
        if window is not None:
            hidden |= seen <= at - window
        grouped = queries[rows].double().reshape(-1, kv_heads, group, head_dim)
        scores = torch.einsum("qhgd,khd->hgqk", grouped, keys) / head_dim**0.5
        scores.masked_fill_(hidden, -torch.inf)
        result = torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), values)
        out[rows] = result.flatten(1, 2)
        log_sums[rows] = scores.logsumexp(-1).permute(2, 0, 1).flatten(1)
    return out, log_sums
