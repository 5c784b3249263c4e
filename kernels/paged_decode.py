"""Attention of one new token a sequence over the pool's blocks, on the GPU.

May be captured in a CUDA graph: the host reads nothing from the device, and memory is allocated by
shape alone. Lengths and tables are read when the kernels run, so a captured step serves any batch
that its shapes have room for. Knows nothing of models and leases.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sessionkv.kernels.arguments import check_tensor
from sessionkv.kernels.attention_arguments import check_batch, check_pool, check_queries
from sessionkv.kernels.attention_launch import (
    NARROW_ROWS,
    Batch,
    Tile,
    Work,
    choose_tile,
    plan_work,
    run_attention,
)


def paged_decode(
    queries: Tensor,
    pool: Tensor,
    layer: int,
    *,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    window: int | None = None,
    out: Tensor | None = None,
    work: Work | None = None,
    tile: Tile | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Attention of the newest token of each sequence, whose key is already in the pool.

    All query heads of a key head share one read of its keys. Where sequences are few, or much
    longer than others, each of these is divided among several programs. Sums are fp32; for the
    tolerance see :mod:`~sessionkv.kernels.attention_kernel`.

    Args:
        queries: ``[num_seqs, num_heads, head_dim]``, each token's heads contiguous, tokens any
            stride apart. Query head h reads key head ``h // (num_heads // kv_heads)``.
        pool: ``[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]``, contiguous, bf16,
            fp16 or fp32, the type of ``queries``; may have more than 2^31 elements.
        layer: Index of the layer.
        block_tables: ``[num_seqs, max_blocks]`` int32; entries past a sequence's length are not
            read.
        seq_lens: ``[num_seqs]`` int32: positions that the query sees, its own included. 0 is a
            row of padding, which gets zeros.
        max_seq_len: Upper bound of ``seq_lens``.
        window: Positions a query sees at most, itself included; None is all.
        out: Where to write the result; contiguous.
        work: What :func:`decode_work` says of the same batch and window; None is to find out.
        tile: Instead of the tile that fits the shapes; not with ``work``.
        num_splits: Parts of every sequence, instead of what fits the lengths; not with ``work``.

    Returns:
        ``[num_seqs, num_heads, head_dim]``, ``out`` if given.

    Raises:
        ValueError: An argument's shape, type, device or strides do not fit.
    """
    check_pool(pool, layer)
    check_queries(queries, pool)
    check_batch(
        pool,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_starts=None,
        max_seq_len=max_seq_len,
        window=window,
    )
    if queries.shape[0] != seq_lens.shape[0]:
        raise ValueError(f"queries are of {queries.shape[0]} sequences, not {seq_lens.shape[0]}")
    if out is None:
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    check_tensor("out", out, queries.shape, dtypes=(queries.dtype,), like=queries)
    if not queries.shape[0]:
        return out
    batch = Batch(block_tables, seq_lens, None, max_seq_len, window)
    if work is None:
        work = _plan(queries, pool, batch, tile, num_splits)
    run_attention(queries, pool, layer, batch=batch, work=work, out=out)
    return out


def decode_work(
    queries: Tensor,
    pool: Tensor,
    *,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    window: int | None = None,
) -> Work:
    """Divide the work of a batch, for any number of layers; arguments as :func:`paged_decode`'s.

    Of ``queries`` only shape and type are looked at. Cost: one launch; lengths are read when it
    runs, on the same stream.
    """
    return _plan(
        queries, pool, Batch(block_tables, seq_lens, None, max_seq_len, window), None, None
    )


def _plan(
    queries: Tensor, pool: Tensor, batch: Batch, tile: Tile | None, num_splits: int | None
) -> Work:
    num_seqs, num_heads, _ = queries.shape
    kv_heads = pool.shape[3]
    rows = min(num_heads // kv_heads, NARROW_ROWS)
    return plan_work(
        batch,
        num_tokens=num_seqs,
        heads=(num_heads, kv_heads),
        tile=tile or choose_tile(queries, rows, num_seqs * kv_heads),
        num_splits=num_splits,
    )
