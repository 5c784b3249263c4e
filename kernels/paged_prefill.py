"""Causal attention of ragged chunks of new tokens over the pool's blocks, on the GPU.

May be captured in a CUDA graph, like :mod:`~sessionkv.kernels.paged_decode`. Knows nothing of
models and leases.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sessionkv.kernels.arguments import FLOAT32, check_tensor
from sessionkv.kernels.attention_arguments import (
    check_batch,
    check_pool,
    check_queries,
    check_range,
)
from sessionkv.kernels.attention_launch import (
    NARROW_ROWS,
    Batch,
    Tile,
    Work,
    choose_tile,
    plan_work,
    run_attention,
)


def paged_prefill(
    queries: Tensor,
    pool: Tensor,
    layer: int,
    *,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    window: int | None = None,
    out: Tensor | None = None,
    log_sums: Tensor | None = None,
    work: Work | None = None,
    tile: Tile | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Causal attention of each sequence's new tokens, whose keys are already in the pool.

    Row i of a sequence of length n with q new tokens stands at position ``n - q + i`` and sees
    positions up to its own. Chunks of any lengths mix, single tokens too. Where new tokens are
    few and positions many, these are divided among several programs. Sums are fp32; for the
    tolerance see :mod:`~sessionkv.kernels.attention_kernel`.

    Args:
        queries: ``[num_tokens, num_heads, head_dim]``, each token's heads contiguous, tokens any
            stride apart: the new tokens of all sequences, one sequence after another. Query head
            h reads key head ``h // (num_heads // kv_heads)``.
        pool: As for :func:`~sessionkv.kernels.paged_decode.paged_decode`.
        layer: Index of the layer.
        block_tables: ``[num_seqs, max_blocks]`` int32; entries past a sequence's length are not
            read.
        query_starts: ``[num_seqs + 1]`` int32, ascending from 0: where each sequence's rows start
            and where the last one's end. Rows after that are padding, and left as they are. A
            sequence of padding has no rows.
        seq_lens: ``[num_seqs]`` int32: positions of each sequence, its new ones included.
        max_query_len: Upper bound of a sequence's new tokens.
        max_seq_len: Upper bound of ``seq_lens``.
        window: Positions a query sees at most, itself included; None is all.
        out: Where to write the result; contiguous.
        log_sums: ``[num_tokens, num_heads]`` fp32, contiguous: written with the natural logarithm
            of each row's sum of exponentials, as
            :func:`~sessionkv.kernels.attention_parts.merge_attention` takes it.
        work: What :func:`prefill_work` says of the same batch and window; None is to find out.
        tile: Instead of the tile that fits the shapes; not with ``work``.
        num_splits: Parts of what every tile sees, instead of what fits the lengths; not with
            ``work``.

    Returns:
        ``[num_tokens, num_heads, head_dim]``, ``out`` if given.

    Raises:
        ValueError: An argument's shape, type, device or strides do not fit.
    """
    check_pool(pool, layer)
    check_queries(queries, pool)
    check_batch(
        pool,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_starts=query_starts,
        max_seq_len=max_seq_len,
        window=window,
    )
    num_tokens = queries.shape[0]
    if num_tokens:
        check_range("max_query_len", max_query_len, 1, num_tokens, why="the rows of queries")
    if out is None:
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    check_tensor("out", out, queries.shape, dtypes=(queries.dtype,), like=queries)
    if log_sums is not None:
        check_tensor("log_sums", log_sums, queries.shape[:2], dtypes=FLOAT32, like=queries)
    if not num_tokens or not seq_lens.shape[0]:
        return out
    batch = Batch(block_tables, seq_lens, query_starts, max_seq_len, window)
    if work is None:
        work = _plan(queries, pool, batch, max_query_len, tile, num_splits)
    run_attention(queries, pool, layer, batch=batch, work=work, out=out, log_sums=log_sums)
    return out


def prefill_work(
    queries: Tensor,
    pool: Tensor,
    *,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    window: int | None = None,
) -> Work:
    """Divide the work of a batch, for any number of layers; arguments as :func:`paged_prefill`'s.

    Of ``queries`` only shape and type are looked at. Cost: one launch; lengths are read when it
    runs, on the same stream.
    """
    batch = Batch(block_tables, seq_lens, query_starts, max_seq_len, window)
    return _plan(queries, pool, batch, max_query_len, None, None)


def _plan(
    queries: Tensor,
    pool: Tensor,
    batch: Batch,
    max_query_len: int,
    tile: Tile | None,
    num_splits: int | None,
) -> Work:
    num_tokens, num_heads, _ = queries.shape
    kv_heads = pool.shape[3]
    # Never the narrow tile: each tile is compiled when it is first used, and this one would be so
    # late, for steps of hundreds of sequences with a few tokens each.
    rows = max(max_query_len * (num_heads // kv_heads), NARROW_ROWS + 1)
    return plan_work(
        batch,
        num_tokens=num_tokens,
        heads=(num_heads, kv_heads),
        tile=tile or choose_tile(queries, rows, batch.seq_lens.shape[0] * kv_heads),
        num_splits=num_splits,
    )
