"""Batches over a pool in which everything that may not be read is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

NUM_LAYERS, LAYER = 3, 1
GARBAGE = (-1, 2**30, -(2**31))
"""Block ids in entries of tables that may not be read."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class PagedBatch:
    """What the kernels take; ``lengths`` are pairs of (new tokens, positions)."""

    lengths: tuple[tuple[int, int], ...]
    queries: torch.Tensor
    pool: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    window: int | None

    @property
    def num_tokens(self) -> int:
        """Rows that belong to a sequence."""
        return sum(new for new, _ in self.lengths)

    @property
    def metadata(self) -> dict[str, torch.Tensor]:
        """Of a ragged batch."""
        return {
            "block_tables": self.block_tables,
            "query_starts": self.query_starts,
            "seq_lens": self.seq_lens,
        }


def paged_batch(
    lengths: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_size: int = 16,
    window: int | None = None,
    padding: int = 0,
    padded_rows: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> PagedBatch:
    """Random keys in random blocks, NaN in all other slots, garbage in all other table entries.

    Args:
        lengths: New tokens and positions of each sequence; (0, 0) is padding.
        heads: Query heads and key heads.
        head_dim: Elements of a head.
        block_size: Positions of a block.
        window: Positions that no query's window reaches are NaN too, and their blocks garbage.
        padding: Entries of every table beyond the longest sequence's.
        padded_rows: Rows of queries after the last sequence's.
        dtype: Of queries and pool.
        device: Of everything.
        seed: Of everything random.
    """
    generator = torch.Generator().manual_seed(seed)
    num_heads, kv_heads = heads
    width = max(-(-length // block_size) for _, length in lengths) + padding
    num_blocks = sum(-(-length // block_size) for _, length in lengths) + 2
    free = (torch.randperm(num_blocks - 2, generator=generator) + 1).tolist()
    shape = (num_blocks, NUM_LAYERS, 2, kv_heads, block_size, head_dim)
    pool = torch.full(shape, torch.nan)
    tables = torch.tensor(GARBAGE).repeat(width)[:width].repeat(len(lengths), 1)
    for row, (new, length) in enumerate(lengths):
        first = 0 if window is None else max(0, length - new + 1 - window)
        for index in range(-(-length // block_size)):
            block, begin = free.pop(), index * block_size
            low, high = max(first - begin, 0), min(length - begin, block_size)
            if low < high:
                tables[row, index] = block
                part = (2, kv_heads, high - low, head_dim)
                pool[block, LAYER, :, :, low:high] = torch.randn(part, generator=generator)
    starts = torch.tensor([0] + [new for new, _ in lengths]).cumsum(0)
    queries = torch.randn(int(starts[-1]) + padded_rows, num_heads, head_dim, generator=generator)
    return PagedBatch(
        lengths=tuple(lengths),
        queries=queries.to(device, dtype),
        pool=pool.to(device, dtype),
        block_tables=tables.to(device, torch.int32),
        query_starts=starts.to(device, torch.int32),
        seq_lens=torch.tensor([length for _, length in lengths], dtype=torch.int32, device=device),
        window=window,
    )
