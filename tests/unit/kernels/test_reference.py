"""The reference itself against dense attention, and the decoder's attention against it."""

from __future__ import annotations

import pytest
import torch

from sessionkv.kernels.reference import paged_attention
from sessionkv.model.attention import AttentionBatch, attend, make_segment
from sessionkv.model.mirror import MirrorPool

LAYERS, KV_HEADS, HEADS, BLOCK, DIM = 2, 2, 6, 4, 8


def dense(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last queries, ``[tokens, heads, dim]`` each."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) / DIM**0.5
    count, total = queries.shape[0], keys.shape[0]
    hidden = torch.arange(total)[None] > torch.arange(total - count, total)[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def test_reference_equals_dense_attention() -> None:
    torch.manual_seed(0)
    pool = torch.randn(6, LAYERS, 2, KV_HEADS, BLOCK, DIM, dtype=torch.float64)
    table, start, count = [3, 0, 5], 4, 6
    queries = torch.randn(count, HEADS, DIM, dtype=torch.float64)
    history = torch.cat([pool[b, 1] for b in table], 2)[:, :, : start + count].transpose(1, 2)
    found = paged_attention(queries, pool, 1, block_table=table, start=start)
    torch.testing.assert_close(found, dense(queries, history[0], history[1]))


def test_reference_with_a_window_sees_only_the_last_positions() -> None:
    torch.manual_seed(1)
    pool = torch.randn(3, LAYERS, 2, KV_HEADS, BLOCK, DIM)
    queries = torch.randn(1, HEADS, DIM)
    changed = pool.clone()
    changed[2, :, :, :, :3] = 99.0  # positions 0 to 2 of table [2, 0]
    options = {"block_table": [2, 0], "start": 6}
    same = [paged_attention(queries, p, 0, window=4, **options) for p in (pool, changed)]
    other = [paged_attention(queries, p, 0, window=5, **options) for p in (pool, changed)]
    assert torch.equal(*same)
    assert not torch.equal(*other)


@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("mirrored", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_attend_equals_the_reference_on_ragged_batches(
    seed: int, mirrored: bool, window: int | None
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    pool = torch.randn(64, LAYERS, 2, KV_HEADS, BLOCK, DIM, generator=generator)
    order = torch.randperm(64, generator=generator).tolist()
    mirrors = MirrorPool(
        num_layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM, max_tokens=99, budget_bytes=2**24
    )
    segments, positions, blocks = [], [], []
    for index in range(4):
        start, count = number(0, 20), number(1, 9)
        table = order[index * 12 : index * 12 + 12]
        mirror = mirrors.create(start + count) if mirrored else None
        segments.append(
            make_segment(
                row=len(positions),
                num_rows=count,
                start=start,
                block_table=table,
                mirror=mirror,
                block_size=BLOCK,
                windows=[window],
            )
        )
        positions += range(start, start + count)
        blocks += [table[p // BLOCK] for p in range(start, start + count)]
    at = torch.tensor(positions)
    batch = AttentionBatch(at, torch.tensor(blocks), at % BLOCK, segments)
    qkv = torch.randn(len(positions), HEADS + 2 * KV_HEADS, DIM, generator=generator)
    out = attend(1, qkv, pool=pool, batch=batch, window=window).view(-1, HEADS, DIM)
    for index, segment in enumerate(segments):
        rows = slice(segment.row, segment.row + segment.num_rows)
        expected = paged_attention(
            qkv[rows, :HEADS],
            pool,
            1,
            block_table=order[index * 12 : index * 12 + 12],
            start=segment.start,
            window=window,
        )
        torch.testing.assert_close(out[rows], expected, atol=2e-6, rtol=1e-5)
