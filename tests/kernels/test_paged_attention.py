"""Decoding and prefill over blocks against the reference, on whatever the kernels run on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sessionkv.kernels import attention_launch
from sessionkv.kernels.attention_launch import Tile, choose_extra
from sessionkv.kernels.attention_work import LISTED, list_work
from sessionkv.kernels.paged_decode import decode_work, paged_decode
from sessionkv.kernels.paged_prefill import paged_prefill, prefill_work
from sessionkv.kernels.reference import ragged_attention
from tests.builders.paged import LAYER, TOLERANCE, PagedBatch, paged_batch

HALF, FULL = torch.float16, torch.float32
SMALL = Tile(16, 16, num_warps=4, num_stages=2)
WIDE = Tile(32, 16, num_warps=4, num_stages=2)  # of more than 16 rows: with loops without a mask
EDGES = (1, 15, 16, 17, 31, 33, 48)


def expected(batch: PagedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    out, logs = ragged_attention(
        batch.queries, batch.pool, LAYER, window=batch.window, **batch.metadata
    )
    rows = batch.num_tokens
    return out[:rows].to(batch.queries.dtype), logs[:rows].float()


def decode(batch: PagedBatch, **options: Any) -> torch.Tensor:
    longest = batch.block_tables.shape[1] * batch.pool.shape[4]
    return paged_decode(
        batch.queries,
        batch.pool,
        LAYER,
        block_tables=batch.block_tables,
        seq_lens=batch.seq_lens,
        max_seq_len=longest,
        window=batch.window,
        **options,
    )


def prefill(batch: PagedBatch, **options: Any) -> torch.Tensor:
    return paged_prefill(
        batch.queries,
        batch.pool,
        LAYER,
        **batch.metadata,
        max_query_len=max(new for new, _ in batch.lengths),
        max_seq_len=batch.block_tables.shape[1] * batch.pool.shape[4],
        window=batch.window,
        **options,
    )


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    bound = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, wanted, atol=bound, rtol=bound)


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "dtype"),
    [
        ((4, 4), 64, 16, HALF),
        ((4, 2), 80, 8, HALF),
        ((3, 1), 96, 32, HALF),
        ((4, 1), 128, 16, FULL),
        ((5, 1), 64, 128, FULL),
        ((6, 1), 256, 64, HALF),
        ((14, 2), 64, 16, FULL),
        ((8, 1), 80, 256, FULL),
    ],
)
def test_both_ways_equal_the_reference_for_every_shape(
    device: torch.device,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    shape: dict[str, Any] = {
        "heads": heads, "head_dim": head_dim, "block_size": block_size, "dtype": dtype,
        "device": device, "padding": 2,
    }  # fmt: skip
    batch = paged_batch([(1, 70), (1, 9)], **shape)
    assert_near(decode(batch), expected(batch)[0])
    batch = paged_batch([(9, 70), (1, 40)], **shape)
    assert_near(prefill(batch), expected(batch)[0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "group", "dtype"),
    [
        (64, 1, torch.bfloat16),
        (80, 2, torch.bfloat16),
        (96, 3, torch.bfloat16),
        (128, 4, torch.bfloat16),
        (256, 5, torch.bfloat16),
        (64, 6, torch.bfloat16),
        (96, 7, torch.bfloat16),
        (256, 8, torch.bfloat16),
        (128, 8, HALF),
        (80, 3, FULL),
        (256, 2, FULL),
    ],
)
def test_tiles_that_are_chosen_run_natively(head_dim: int, group: int, dtype: torch.dtype) -> None:
    """Long enough for splits, and for every tile."""
    shape: dict[str, Any] = {
        "heads": (2 * group, 2), "head_dim": head_dim, "dtype": dtype, "device": "cuda",
    }  # fmt: skip
    batch = paged_batch([(1, n) for n in (1, 4000, 64, 0, 129)], **shape)
    assert_near(decode(batch), expected(batch)[0])
    for longest in (2, 8, 200):
        batch = paged_batch([(longest, 4000), (1, 1), (longest // 2, 300)], **shape)
        assert_near(prefill(batch), expected(batch)[0])


@pytest.mark.parametrize(("window", "num_splits"), [(None, 1), (None, 5), (20, 1), (20, 2), (1, 2)])
def test_decode_at_the_edges_of_blocks_tiles_and_splits(
    device: torch.device, window: int | None, num_splits: int
) -> None:
    batch = paged_batch([(1, n) for n in EDGES], heads=(3, 1), window=window, device=device)
    assert_near(decode(batch, tile=SMALL, num_splits=num_splits), expected(batch)[0])


@pytest.mark.parametrize(
    ("tile", "window", "num_splits"),
    [
        (SMALL, None, 1),
        (SMALL, 7, 3),
        (WIDE, None, 1),
        (WIDE, None, 3),
        (WIDE, 1, 1),
        (WIDE, 7, 3),
        (WIDE, 26, 1),
    ],
)
def test_prefill_of_ragged_chunks(
    device: torch.device, tile: Tile, window: int | None, num_splits: int
) -> None:
    """Fresh and continued chunks, single tokens among them, ends within and at edges of tiles."""
    lengths = [(7, 7), (1, 48), (10, 58), (0, 0), (1, 1), (0, 0)]
    batch = paged_batch(lengths, heads=(3, 1), window=window, padded_rows=2, device=device)
    out = torch.full_like(batch.queries, 7.0)
    logs = torch.full(out.shape[:2], 7.0, device=device)
    prefill(batch, tile=tile, num_splits=num_splits, out=out, log_sums=logs)
    wanted, wanted_logs = expected(batch)
    rows = batch.num_tokens
    assert_near(out[:rows], wanted)
    assert_near(logs[:rows], wanted_logs)
    assert (out[rows:] == 7.0).all()
    assert (logs[rows:] == 7.0).all()


@pytest.mark.parametrize("num_splits", [1, 3])
def test_decode_gives_zeros_for_rows_of_padding(device: torch.device, num_splits: int) -> None:
    batch = paged_batch([(1, 20), (1, 0), (1, 33)], device=device)
    out = decode(batch, tile=SMALL, num_splits=num_splits)
    assert_near(out, expected(batch)[0])
    assert (out[1] == 0.0).all()


def listed(batch: PagedBatch, *, tokens: int, room: int, **options: Any) -> list[list[int]]:
    """Items of the list: sequence, first new token, part, parts."""
    items = torch.full((room + 1, 4), 77, dtype=torch.int32, device=batch.seq_lens.device)
    constants = {
        "WINDOW": None, "LEAST": 16, "MULTIPLE": 16, "LISTED": LISTED, "TOKENS": tokens,
        "EARLY": False,
    }  # fmt: skip
    list_work[(-(-room // LISTED),)](
        batch.query_starts, batch.seq_lens, items, len(batch.lengths), room,
        **{"extra": 1, "num_parts": 0, **constants, **options},
    )  # fmt: skip
    assert (items[-1] == 77).all()
    return [item for item in items[:-1].tolist() if item[0] >= 0]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"num_parts": 1}, {0: 1, 1: 1, 3: 1}),
        ({"num_parts": 3}, {0: 3, 1: 3, 3: 3}),
        ({"extra": 1}, {0: 1, 1: 1, 3: 1}),  # 280 positions to be seen, 288 a part
        ({"extra": 5}, {0: 1, 1: 3, 3: 1}),  # 64 a part
        ({"extra": 10}, {0: 2, 1: 6, 3: 1}),  # 32
        ({"extra": 10, "LEAST": 100}, {0: 1, 1: 2, 3: 1}),
        ({"extra": 10, "WINDOW": 60}, {0: 2, 1: 2, 3: 1}),  # of 64 at most, 32
        ({"extra": 99}, {0: 3, 1: 12, 3: 2}),
    ],
)
def test_long_tiles_are_divided(
    device: torch.device, options: dict[str, int], parts: dict[int, int]
) -> None:
    """Of five tokens: two tiles of a sequence, one, none, one with two rows, one of padding."""
    batch = paged_batch([(9, 40), (1, 180), (0, 90), (2, 20), (0, 0)], device=device)
    batch.seq_lens[2] = 90
    tokens = {0: (0, 5), 1: (0,), 3: (0,)}
    wanted = [
        [seq, first, part, count]
        for seq, count in parts.items()
        for first in tokens[seq]
        for part in range(count)
    ]
    options = {"extra": 1, "num_parts": 0, **options}
    room = 4 + options["extra"] if not options["num_parts"] else 4 * options["num_parts"]
    assert listed(batch, tokens=5, room=room, **options) == wanted


def test_work_of_many_sequences_is_listed_once_and_fits(device: torch.device) -> None:
    """More sequences than are looked at together."""
    lengths = [(17 * i % 5, 31 * i % 97 + 5) for i in range(300)]
    batch = PagedBatch(
        lengths=tuple(lengths), queries=torch.empty(0), pool=torch.empty(0),
        block_tables=torch.empty(0), window=None,
        query_starts=torch.tensor([0] + [new for new, _ in lengths]).cumsum(0).to(device).int(),
        seq_lens=torch.tensor([length for _, length in lengths], device=device).int(),
    )  # fmt: skip
    found = listed(batch, tokens=2, room=700, extra=40)
    positions = sum(-(-new // 2) * length for new, length in lengths)
    longest = -(-positions // 40 // 16) * 16
    wanted = [
        [seq, first, part, -(-length // longest)]
        for seq, (new, length) in enumerate(lengths)
        for first in range(0, new, 2)
        for part in range(-(-length // longest))
    ]
    assert found == wanted
    assert len(wanted) <= 40 + sum(-(-new // 2) for new, _ in lengths)


@pytest.mark.parametrize("window", [None, 70])
def test_unlike_lengths_are_divided_by_themselves(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """As on a device with several multiprocessors, where parts pay."""
    monkeypatch.setattr(attention_launch, "num_sms", lambda device: 6)
    monkeypatch.setattr(attention_launch, "_NARROW_LEAST", 16)
    batch = paged_batch([(1, 9), (1, 150), (1, 0), (1, 33)], window=window, device=device)
    arguments: dict[str, Any] = {
        "block_tables": batch.block_tables, "seq_lens": batch.seq_lens, "max_seq_len": 160,
        "window": window,
    }  # fmt: skip
    work = decode_work(batch.queries, batch.pool, **arguments)
    assert max(work.items[:, 3].tolist()) == (3 if window is None else 2)
    out = paged_decode(batch.queries, batch.pool, LAYER, **arguments, work=work)
    assert_near(out, expected(batch)[0])
    batch = paged_batch([(3, 9), (2, 150), (0, 0), (5, 33)], window=window, device=device)
    arguments = {**batch.metadata, "max_query_len": 5, "max_seq_len": 160, "window": window}
    work = prefill_work(batch.queries, batch.pool, **arguments)
    assert max(work.items[:, 3].tolist()) > 1
    out = paged_prefill(batch.queries, batch.pool, LAYER, **arguments, work=work)
    assert_near(out, expected(batch)[0])


def test_queries_may_lie_among_keys_and_values(device: torch.device) -> None:
    batch = paged_batch([(1, 20), (1, 3)], device=device)
    qkv = torch.full((2, 8, 64), torch.nan, device=device)
    qkv[:, :4] = batch.queries
    options: dict[str, Any] = {"block_tables": batch.block_tables, "seq_lens": batch.seq_lens}
    out = paged_decode(qkv[:, :4], batch.pool, LAYER, max_seq_len=20, **options)
    assert_near(out, expected(batch)[0])


def test_nan_in_what_is_seen_is_not_hidden(device: torch.device) -> None:
    batch = paged_batch([(1, 40), (1, 40)], device=device)
    batch.pool[batch.block_tables[1, 1], LAYER, 0, 0, 3, 5] = torch.nan
    for num_splits in (1, 3):
        out = decode(batch, tile=SMALL, num_splits=num_splits)
        assert out[1, :2].isnan().all()
        assert out.isfinite().sum() == 6 * 64


@pytest.mark.parametrize(("tile", "extra"), [(SMALL, 33), (WIDE, 16)])
def test_parts_fill_the_device_once(tile: Tile, extra: int) -> None:
    assert choose_extra(tile, 8, sms=132) == extra
    assert choose_extra(tile, 1024, sms=132) == 1


@pytest.mark.parametrize(("new", "length", "rows"), [(1, 1, 64), (8, 9, 64), (33, 33, 128)])
def test_steps_of_any_lengths_use_kernels_that_a_long_one_has_compiled(
    new: int, length: int, rows: int
) -> None:
    batch = paged_batch([(new, length)], dtype=torch.bfloat16)
    work = prefill_work(
        batch.queries, batch.pool, **batch.metadata, max_query_len=new, max_seq_len=length
    )
    assert (work.tile.rows, work.is_split) == (rows, True)


def test_arguments_that_do_not_fit_are_named() -> None:
    batch = paged_batch([(1, 20), (1, 3)])
    good: dict[str, Any] = {
        "queries": batch.queries, "pool": batch.pool, "layer": LAYER,
        "block_tables": batch.block_tables, "seq_lens": batch.seq_lens, "max_seq_len": 20,
    }  # fmt: skip
    for change, message in [
        ({"layer": 3}, "layer is 3, not 0 to 2"),
        ({"max_seq_len": 33}, r"max_seq_len is 33, not 1 to 32 \(the room of a block table\)"),
        ({"window": 0}, "window is 0, not at least 1"),
        ({"seq_lens": batch.seq_lens.long()}, "seq_lens is torch.int64, not torch.int32"),
        ({"block_tables": batch.block_tables[:1]}, r"block_tables has shape \[1, 2\]"),
        ({"queries": batch.queries[:1]}, "queries are of 1 sequences, not 2"),
        ({"queries": batch.queries.half()}, "queries is torch.float16 on cpu, not torch.float32"),
        ({"queries": batch.queries[:, :3]}, "queries have 3 heads, no multiple of 2"),
        ({"queries": batch.queries[:, :, :32]}, "heads must be 64 elements each"),
        ({"pool": batch.pool[:, :, :, :, ::2]}, "pool has strides"),
        ({"pool": batch.pool[..., :24].contiguous()}, "head_dim is 24, not a multiple of 16"),
        ({"out": batch.queries[:1]}, r"out has shape \[1, 4, 64\]"),
        ({"num_splits": 129}, "num_splits is 129, not 1 to 128"),
    ]:
        with pytest.raises(ValueError, match=message):
            paged_decode(**{**good, **change})
    with pytest.raises(ValueError, match=r"max_query_len is 3, not 1 to 2 \(the rows of queries\)"):
        paged_prefill(**good, query_starts=batch.query_starts, max_query_len=3)


def test_a_batch_of_nothing_is_nothing() -> None:
    batch = paged_batch([(1, 20)])
    empty: dict[str, Any] = {
        "queries": batch.queries[:0], "pool": batch.pool, "layer": LAYER,
        "block_tables": batch.block_tables[:0], "seq_lens": batch.seq_lens[:0], "max_seq_len": 1,
    }  # fmt: skip
    assert paged_decode(**empty).shape == (0, 4, 64)
    starts = batch.query_starts[:1]
    assert paged_prefill(**empty, query_starts=starts, max_query_len=1).shape == (0, 4, 64)


@pytest.mark.gpu
def test_a_captured_step_serves_other_lengths() -> None:
    first = paged_batch([(1, 500), (1, 30), (1, 0)], dtype=torch.bfloat16, device="cuda", padding=9)
    out = torch.full_like(first.queries, torch.nan)
    decode(first, out=out)  # compiles, which a capture may not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(first, out=out)
    first.seq_lens.copy_(torch.tensor([77, 0, 0]))
    out.fill_(torch.nan)
    graph.replay()
    starts = torch.tensor([0, 1, 1, 1], dtype=torch.int32, device="cuda")
    wanted, _ = ragged_attention(
        first.queries, first.pool, LAYER, block_tables=first.block_tables, query_starts=starts,
        seq_lens=first.seq_lens,
    )  # fmt: skip
    assert_near(out, wanted.to(out.dtype))


@pytest.mark.gpu
def test_blocks_lie_further_than_32_bits_reach() -> None:
    """Offsets over 2^32 elements: one that wraps would stay inside the pool."""
    batch = paged_batch([(1, 40), (1, 16)], heads=(4, 2), dtype=torch.bfloat16, device="cuda")
    num_blocks = 2**32 // batch.pool[0].numel() + 2 * batch.pool.shape[0]
    pool = torch.empty((num_blocks, *batch.pool.shape[1:]), dtype=torch.bfloat16, device="cuda")
    shift = num_blocks - batch.pool.shape[0]
    pool[shift:] = batch.pool
    tables = batch.block_tables + shift
    out = paged_decode(
        batch.queries, pool, LAYER, block_tables=tables, seq_lens=batch.seq_lens, max_seq_len=40
    )
    assert_near(out, expected(batch)[0])
