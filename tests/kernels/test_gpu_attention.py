"""Which way rows go, and that all ways together are one attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sessionkv.kernels.reference import ragged_attention
from sessionkv.model.gpu_attention import (
    DividedPrefill,
    FusedSizes,
    GpuAttention,
    Piece,
    cudnn_attention,
    divide_rows,
)
from sessionkv.model.gpu_batch import DecodeRows, GpuBatch, PrefillRows
from tests.builders.paged import LAYER, TOLERANCE, PagedBatch, paged_batch

SMALL = FusedSizes(rows=8, min_rows=6, pieces=(32, 16))


class MathAttention:
    """Attention in plain torch that notes the shapes it is called with."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.shapes.append((queries.shape[0], keys.shape[1]))
        group = queries.shape[1] // keys.shape[0]
        keys, values = (x.float().repeat_interleave(group, 0) for x in (keys, values))
        scores = torch.einsum("qhd,hkd->hqk", queries.float(), keys) / keys.shape[2] ** 0.5
        found = torch.einsum("hqk,hkd->qhd", scores.softmax(-1), values)
        return found.to(queries.dtype), scores.logsumexp(-1).T


def step_of(batch: PagedBatch, *, num_decode: int = 0) -> GpuBatch:
    """The first sequences decode, the others prefill."""
    prefill = None
    if batch.lengths[num_decode:]:
        prefill = PrefillRows(
            batch.block_tables[num_decode:],
            batch.query_starts[num_decode:] - num_decode,
            batch.seq_lens[num_decode:],
            batch.lengths[num_decode:],
        )
    decode = None
    if num_decode:
        lens = batch.seq_lens[:num_decode]
        decode = DecodeRows(batch.block_tables[:num_decode], lens, int(lens.max()))
    nothing = torch.empty(0)  # attention looks at neither tokens nor slots
    return GpuBatch(nothing, nothing, nothing, decode, prefill)


def attend(
    attention: GpuAttention, batch: PagedBatch, *, num_decode: int = 0
) -> tuple[Tensor, DividedPrefill | None]:
    step = attention.begin(step_of(batch, num_decode=num_decode), batch.pool.shape[4])
    found = attention.attend(batch.queries, batch.pool, LAYER, step=step, window=batch.window)
    again = attention.attend(batch.queries, batch.pool, LAYER, step=step, window=batch.window)
    assert torch.equal(found, again)  # as another layer of the step would
    return found, step.divided


def assert_is_attention(found: Tensor, batch: PagedBatch) -> None:
    wanted, _ = ragged_attention(
        batch.queries, batch.pool, LAYER, window=batch.window, **batch.metadata
    )
    bound = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, wanted.to(found.dtype), atol=bound, rtol=bound)


@pytest.mark.parametrize(
    ("lengths", "pieces"),
    [
        ([(5, 100)], [Piece(0, 0, 5, 100, 0)]),  # too few rows
        ([(8, 23)], [Piece(0, 0, 8, 23, 0)]),  # too few positions before them
        ([(8, 24)], [Piece(0, 0, 8, 24, 16)]),
        ([(6, 54)], [Piece(0, 0, 6, 54, 48)]),
        (
            [(21, 51)],
            [Piece(0, 0, 8, 38, 16), Piece(0, 8, 8, 46, 32), Piece(0, 16, 5, 51, 0)],
        ),
        (
            [(3, 3), (30, 30), (2, 90)],
            [
                Piece(0, 0, 3, 3, 0),
                Piece(1, 3, 16, 16, 0),
                Piece(1, 19, 8, 24, 16),
                Piece(1, 27, 6, 30, 16),
                Piece(2, 33, 2, 90, 0),
            ],
        ),
    ],
    ids=["few rows", "short", "long", "fewer rows", "a tail", "beginning with nothing"],
)
def test_rows_are_cut_where_another_number_of_positions_is_covered(
    lengths: list[tuple[int, int]], pieces: list[Piece]
) -> None:
    assert divide_rows(lengths, SMALL) == pieces


def attention_for(batch: PagedBatch, full: MathAttention | None) -> GpuAttention:
    return GpuAttention(
        kv_heads=batch.pool.shape[3],
        head_dim=batch.pool.shape[5],
        dtype=batch.queries.dtype,
        device=batch.queries.device,
        full_attention=full,
        sizes=SMALL,
    )


@pytest.mark.parametrize(
    ("lengths", "num_decode", "shapes"),
    [
        ([(8, 100)], 0, [(8, 32), (8, 32), (8, 16)]),
        ([(7, 40)], 0, [(8, 32)]),  # fewer rows than a call has
        ([(1, 30), (1, 9), (3, 70), (21, 51), (4, 4)], 2, [(8, 16), (8, 32)]),
        ([(2, 2), (30, 60)], 0, [(8, 16), (8, 32), (8, 32), (8, 32), (8, 16)]),
    ],
    ids=["many positions", "few rows", "a mixture", "more and more positions"],
)
def test_all_ways_together_are_one_attention(
    device: torch.device,
    lengths: list[tuple[int, int]],
    num_decode: int,
    shapes: list[tuple[int, int]],
) -> None:
    batch = paged_batch(lengths, block_size=8, padding=3, device=device)
    full = MathAttention()
    found, _ = attend(attention_for(batch, full), batch, num_decode=num_decode)
    assert_is_attention(found, batch)
    assert full.shapes == 2 * shapes


def test_layers_with_a_window_are_left_to_the_paged_kernel(device: torch.device) -> None:
    batch = paged_batch([(8, 60)], block_size=8, window=20, device=device)
    full = MathAttention()
    found, divided = attend(attention_for(batch, full), batch)
    assert_is_attention(found, batch)
    assert divided is not None  # for other layers
    assert full.shapes == []


def test_without_a_library_nothing_is_divided() -> None:
    batch = paged_batch([(8, 60)], block_size=8)
    found, divided = attend(attention_for(batch, None), batch)
    assert divided is None
    assert_is_attention(found, batch)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8), (16, 16), (8, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_library_attends_and_returns_its_sums(heads: tuple[int, int], head_dim: int) -> None:
    torch.manual_seed(0)
    shape = {"device": "cuda", "dtype": torch.bfloat16}
    queries = torch.randn(700, heads[0], head_dim, **shape)[100:612]
    keys, values = torch.randn(2, heads[1], 8192, head_dim, **shape)[:, :, 2048:4096]
    found, logs = cudnn_attention(queries, keys, values)
    wanted, wanted_logs = MathAttention()(queries, keys, values)
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(logs, wanted_logs, atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lengths", [[(512, 8192)], [(400, 2500)], [(1, 900), (77, 3000), (1600, 12_000), (600, 600)]]
)
def test_long_prefill_natively(lengths: list[tuple[int, int]]) -> None:
    batch = paged_batch(
        lengths, heads=(32, 8), head_dim=128, dtype=torch.bfloat16, device="cuda", padding=1
    )
    attention = GpuAttention(
        kv_heads=8, head_dim=128, dtype=torch.bfloat16, device=torch.device("cuda")
    )
    found, divided = attend(attention, batch)
    assert divided is not None
    assert_is_attention(found, batch)
