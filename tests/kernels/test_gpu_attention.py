"""Which way rows go, and that all ways together are one attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sessionkv.kernels.reference import ragged_attention
from sessionkv.model.divided_prefill import DividedPrefill, FusedSizes, Piece, divide_rows
from sessionkv.model.fused_prefill import cudnn_attention
from sessionkv.model.gpu_attention import GpuAttention
from sessionkv.model.gpu_batch import DecodeRows, GpuBatch, PrefillRows
from tests.builders.paged import LAYER, TOLERANCE, PagedBatch, paged_batch

SMALL = FusedSizes(rows=8, min_rows=6, pieces=(32, 16), squares=(32, 16))
Call = tuple[int, int, bool]
"""Rows, positions, and whether it is causal."""


def full(positions: int, rows: int = 8) -> Call:
    return (rows, positions, False)


def square(length: int) -> Call:
    return (length, length, True)


class MathAttention:
    """Attention in plain torch that notes the shapes it is called with."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        self.calls.append((queries.shape[0], keys.shape[1], causal))
        group = queries.shape[1] // keys.shape[0]
        keys, values = (x.float().repeat_interleave(group, 0) for x in (keys, values))
        scores = torch.einsum("qhd,hkd->hqk", queries.float(), keys) / keys.shape[2] ** 0.5
        if causal:
            scores += torch.full(scores.shape[1:], -torch.inf, device=scores.device).triu(1)
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
        ([(16, 16)], [Piece(0, 0, 16, 16, 0, True)]),
        ([(48, 48)], [Piece(0, 0, 32, 32, 0, True), Piece(0, 32, 16, 48, 32, True)]),
        (
            [(3, 3), (68, 90)],
            [
                Piece(0, 0, 3, 3, 0),
                Piece(1, 3, 8, 30, 16),
                Piece(1, 11, 2, 32, 0),
                Piece(1, 13, 32, 64, 32, True),
                Piece(1, 45, 16, 80, 64, True),
                Piece(1, 61, 8, 88, 80),
                Piece(1, 69, 2, 90, 0),
            ],
        ),
        (
            [(21, 62)],
            [Piece(0, 0, 8, 49, 32), Piece(0, 8, 8, 57, 48), Piece(0, 16, 5, 62, 0)],
        ),
        (
            [(3, 3), (30, 30), (2, 90)],
            [
                Piece(0, 0, 3, 3, 0),
                Piece(1, 3, 16, 16, 0, True),
                Piece(1, 19, 8, 24, 16),
                Piece(1, 27, 6, 30, 16),
                Piece(2, 33, 2, 90, 0),
            ],
        ),
    ],
    ids=[
        "few rows",
        "short",
        "long",
        "fewer rows",
        "a square",
        "squares",
        "around squares",
        "a tail",
        "beginning with nothing",
    ],
)
def test_rows_are_cut_where_another_number_of_positions_is_covered(
    lengths: list[tuple[int, int]], pieces: list[Piece]
) -> None:
    assert divide_rows(lengths, SMALL) == pieces


def attention_for(batch: PagedBatch, library: MathAttention | None) -> GpuAttention:
    return GpuAttention(
        num_heads=batch.queries.shape[1],
        kv_heads=batch.pool.shape[3],
        head_dim=batch.pool.shape[5],
        dtype=batch.queries.dtype,
        device=batch.queries.device,
        fused_attention=library,
        sizes=SMALL,
    )


@pytest.mark.parametrize(
    ("lengths", "num_decode", "calls"),
    [
        ([(8, 100)], 0, [full(32), full(32), full(16)]),
        ([(7, 40)], 0, [full(32)]),  # fewer rows than a call has
        ([(1, 30), (1, 9), (3, 70), (21, 62), (4, 4)], 2, [full(32), full(32), full(16)]),
        ([(2, 2), (29, 62)], 0, [full(32), full(32), full(32), full(16)]),
        ([(16, 16)], 0, [square(16)]),
        ([(1, 5), (32, 32), (3, 40)], 1, [square(32)]),
        (
            [(98, 130)],
            0,
            [square(32)] * 3 + [full(32, rows=32)] * 6,
        ),
        (
            [(3, 3), (60, 82)],
            0,
            [square(32), square(16), full(16), full(32, 32), full(32, 16), full(32, 16)],
        ),
    ],
    ids=[
        "many positions",
        "few rows",
        "a mixture",
        "more and more positions",
        "a square",
        "a square in a mixture",
        "squares that see others",
        "around squares",
    ],
)
def test_all_ways_together_are_one_attention(
    device: torch.device,
    lengths: list[tuple[int, int]],
    num_decode: int,
    calls: list[Call],
) -> None:
    batch = paged_batch(lengths, block_size=8, padding=3, device=device)
    library = MathAttention()
    found, _ = attend(attention_for(batch, library), batch, num_decode=num_decode)
    assert_is_attention(found, batch)
    assert library.calls == 2 * calls
    assert set(calls) <= set(SMALL.calls())


def test_every_call_can_be_planned_before() -> None:
    batch = paged_batch([(4, 4)], block_size=8)
    library = MathAttention()
    attention_for(batch, library).plan_calls()
    assert library.calls == list(SMALL.calls())
    assert len(set(library.calls)) == len(library.calls)


def test_layers_with_a_window_are_left_to_the_paged_kernel(device: torch.device) -> None:
    batch = paged_batch([(8, 60)], block_size=8, window=20, device=device)
    library = MathAttention()
    found, divided = attend(attention_for(batch, library), batch)
    assert_is_attention(found, batch)
    assert divided is not None  # for other layers
    assert library.calls == []


def test_without_a_library_nothing_is_divided(device: torch.device) -> None:
    batch = paged_batch([(8, 60)], block_size=8, device=device)  # fp32, which no library takes
    found, divided = attend(attention_for(batch, None), batch)
    assert divided is None
    assert_is_attention(found, batch)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8), (16, 16), (8, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_the_library_attends_and_returns_its_sums(
    heads: tuple[int, int], head_dim: int, causal: bool
) -> None:
    torch.manual_seed(0)
    shape = {"device": "cuda", "dtype": torch.bfloat16}
    num_rows = 2048 if causal else 512
    queries = torch.randn(2200, heads[0], head_dim, **shape)[100 : 100 + num_rows]
    keys, values = torch.randn(2, heads[1], 8192, head_dim, **shape)[:, :, 2048:4096]
    found, logs = cudnn_attention(queries, keys, values, causal=causal)
    wanted, wanted_logs = MathAttention()(queries, keys, values, causal=causal)
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(logs, wanted_logs, atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lengths",
    [
        [(512, 8192)],
        [(400, 2500)],
        [(1, 900), (77, 3000), (1600, 12_000), (600, 600)],
        [(8192, 8192)],
        [(8192, 12_288)],
        [(3, 3), (5000, 9001)],
    ],
)
def test_long_prefill_natively(lengths: list[tuple[int, int]]) -> None:
    batch = paged_batch(
        lengths, heads=(32, 8), head_dim=128, dtype=torch.bfloat16, device="cuda", padding=1
    )
    attention = GpuAttention(
        num_heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16, device=torch.device("cuda")
    )
    found, divided = attend(attention, batch)
    assert divided is not None
    assert_is_attention(found, batch)
