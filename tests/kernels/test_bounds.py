"""Every launch stays inside what it was given, with guards round each tensor and each block.

What a kernel computes is compared elsewhere over more shapes; here results show that nothing was
read beyond an extent, as that would make them NaN, or an index into nowhere.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from sessionkv.kernels import reference_pointwise as reference
from sessionkv.kernels.attention_launch import Tile
from sessionkv.kernels.attention_parts import gather_kv_layer, merge_attention
from sessionkv.kernels.block_copies import copy_block_slots, gather_blocks, scatter_blocks
from sessionkv.kernels.fused_norm import add_rms_norm, rms_norm
from sessionkv.kernels.paged_decode import paged_decode
from sessionkv.kernels.paged_prefill import paged_prefill
from sessionkv.kernels.pinned_copies import copy_pinned
from sessionkv.kernels.reference import ragged_attention
from sessionkv.kernels.rotary_store import rotate_and_store
from sessionkv.kernels.silu_mul import silu_mul
from sessionkv.kernels.skinny_linear import skinny_gated_linear, skinny_linear
from tests.builders.guarded import PATTERN, Guarded
from tests.builders.paged import LAYER, PagedBatch, paged_batch

HALF, FULL, BRAIN = torch.float16, torch.float32, torch.bfloat16
NEAR = {FULL: 2e-5, HALF: 6e-3, BRAIN: 3e-2}
NARROW = Tile(16, 16, num_warps=4, num_stages=2)
WIDE = Tile(32, 16, num_warps=4, num_stages=2)
SHAPES = [(64, 16, FULL), (96, 8, BRAIN), (128, 16, HALF), (256, 32, FULL)]
"""Head dims, block sizes, types."""


@pytest.fixture
def memory(device: torch.device) -> Guarded:
    return Guarded(device)


def randn(*shape: int, dtype: torch.dtype = FULL, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(found: Tensor, wanted: Tensor) -> None:
    """NaN equals NaN: the pattern where nothing is to be written."""
    bound = NEAR[found.dtype]
    wanted = wanted.to(found.device, found.dtype)
    torch.testing.assert_close(found, wanted, atol=bound, rtol=bound, equal_nan=True)


def untouched(tensor: Tensor) -> bool:
    """Whether memory that nobody has written is still so, bit by bit."""
    return bool((tensor.contiguous().view(torch.int16) == PATTERN).all())


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype", "norms"),
    [(*shape, norms) for shape, norms in zip(SHAPES, itertools.cycle((True, False)), strict=False)],
    ids=str,
)
def test_rotary_store(
    memory: Guarded, head_dim: int, block_size: int, dtype: torch.dtype, norms: bool
) -> None:
    num_blocks, heads, kv_heads = 5, 5, 2
    last = num_blocks * block_size - 1
    slots = [
        last,
        -1,
        2 * block_size,
        0,
        2 * block_size - 1,
        -1,
    ]  # blocks 3 and its last are nobody's
    angles = torch.outer(torch.arange(9.0), torch.linspace(1, 0.1, head_dim // 2))
    arguments: dict[str, Any] = {
        "positions": torch.tensor([8, 0, 3, 0, 8, 8]), "slots": torch.tensor(slots),
        "cos_sin": torch.cat([angles.cos(), angles.sin()], 1),
        "q_norm": randn(head_dim, dtype=dtype, seed=1) if norms else None,
        "k_norm": randn(head_dim, dtype=dtype, seed=2) if norms else None,
    }  # fmt: skip
    qkv = randn(len(slots), heads + 2 * kv_heads, head_dim, dtype=dtype)
    pool = memory.fresh(num_blocks, 3, 2, kv_heads, block_size, head_dim, dtype=dtype)
    wanted = pool.cpu()
    given = {name: None if v is None else memory.given(v) for name, v in arguments.items()}
    given_qkv = memory.given(qkv)
    options = {"eps": 1e-6, "layer": 2}
    queries = memory.run(rotate_and_store, given_qkv, pool=pool, **given, **options)
    near(queries, reference.rotate_and_store(qkv, pool=wanted, **arguments, **options))
    near(pool, wanted)
    for slot in {slot for slot in range(last + 1)} - set(slots):
        assert untouched(pool[slot // block_size, :, :, :, slot % block_size])
    assert untouched(pool[:, :2])


def guarded_batch(memory: Guarded, lengths: list[tuple[int, int]], **options: Any) -> PagedBatch:
    """As in the engine: queries lie among keys and values, lengths anywhere in longer lists.

    The last block of the pool has an owner, the first has none. Entries of tables that are nobody's
    are ids that are in no pool.
    """
    batch = paged_batch(lengths, **options)
    last = batch.pool.shape[0] - 2
    assert batch.window or last in batch.block_tables
    rows, heads, head_dim = batch.queries.shape
    qkv = torch.full((rows, heads + 4, head_dim), torch.nan, dtype=batch.queries.dtype)
    qkv[:, :heads] = batch.queries
    return PagedBatch(
        lengths=batch.lengths,
        queries=memory.given(qkv)[:, :heads],
        pool=memory.given(batch.pool[:-1].contiguous()),
        block_tables=memory.given(batch.block_tables, shift=1),
        query_starts=memory.given(batch.query_starts, shift=1),
        seq_lens=memory.given(batch.seq_lens, shift=1),
        window=batch.window,
    )


def edges(block_size: int) -> tuple[int, ...]:
    return (1, block_size - 1, block_size, block_size + 1, 2 * block_size + 3)


def natively(*cases: tuple[Any, ...]) -> list[Any]:
    """Cases that would take the interpreter long, or that it cannot do: products of bf16."""
    return [pytest.param(*case, marks=pytest.mark.gpu) for case in cases]


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype", "window", "num_splits"),
    [
        (64, 16, FULL, None, None),
        (96, 8, HALF, None, 3),
        (128, 16, HALF, 5, 2),
        (256, 8, FULL, None, None),
        *natively(
            *itertools.product((64, 96, 128, 256), (16,), (BRAIN,), (None, 5), (None, 3)),
            (256, 256, BRAIN, None, None),
            (256, 32, FULL, 5, 3),
        ),
    ],
    ids=str,
)
def test_paged_decode(
    memory: Guarded,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    num_splits: int | None,
) -> None:
    lengths = [(1, length) for length in (0, *edges(block_size))]
    batch = guarded_batch(
        memory, lengths, heads=(3, 1), head_dim=head_dim, block_size=block_size, dtype=dtype,
        window=window, padding=2 if window is None else 0,
    )  # fmt: skip
    out = memory.run(
        paged_decode,
            batch.queries, batch.pool, LAYER, block_tables=batch.block_tables,
            seq_lens=batch.seq_lens, max_seq_len=max(edges(block_size)), window=window,
            num_splits=num_splits, tile=None if num_splits is None else NARROW,
    )  # fmt: skip
    wanted, _ = ragged_attention(batch.queries, batch.pool, LAYER, window=window, **batch.metadata)
    near(out, wanted)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype", "tile", "window", "num_splits"),
    [
        (64, 16, FULL, None, None, None),
        (96, 8, HALF, NARROW, None, 3),
        (128, 8, HALF, WIDE, 5, 2),
        (256, 8, FULL, None, None, None),
        *natively(
            *itertools.product((64, 96, 128, 256), (16,), (BRAIN,), (None,), (None, 5), (None, 3)),
            (128, 256, BRAIN, None, None, None),
            (256, 32, FULL, WIDE, 5, 3),
        ),
    ],
    ids=str,
)
def test_paged_prefill(
    memory: Guarded,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    tile: Tile | None,
    window: int | None,
    num_splits: int | None,
) -> None:
    lengths = [(length, length) for length in (0, *edges(block_size)[:-1])]
    lengths.append((3, edges(block_size)[-1]))
    batch = guarded_batch(
        memory, lengths, heads=(3, 1), head_dim=head_dim, block_size=block_size, dtype=dtype,
        window=window, padding=2 if window is None else 0, padded_rows=3,
    )  # fmt: skip
    out = memory.fresh(*batch.queries.shape, dtype=dtype)
    logs = memory.written(torch.zeros(out.shape[:2]), shift=1)
    memory.run(
        paged_prefill,
            batch.queries, batch.pool, LAYER, **batch.metadata, max_query_len=block_size + 1,
            max_seq_len=max(edges(block_size)), window=window, out=out, log_sums=logs, tile=tile,
            num_splits=num_splits,
    )  # fmt: skip
    rows = batch.num_tokens
    wanted, wanted_logs = ragged_attention(
        batch.queries, batch.pool, LAYER, window=window, **batch.metadata
    )
    near(out[:rows], wanted[:rows])
    near(logs[:rows], wanted_logs[:rows])
    assert untouched(out[rows:])
    assert not logs[rows:].any()


@pytest.mark.parametrize(("head_dim", "block_size", "dtype"), SHAPES, ids=str)
def test_gather_of_a_layer(
    memory: Guarded, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    for length in edges(block_size):
        batch = guarded_batch(
            memory, [(1, length)], head_dim=head_dim, block_size=block_size, dtype=dtype
        )
        out = memory.fresh(2, 2, length + 1, head_dim, dtype=dtype)
        table, pool = batch.block_tables[0], batch.pool
        memory.run(
            gather_kv_layer,
            pool,
            LAYER,
            block_table=table,
            num_tokens=length,
            out=out[:, :, :length],
        )
        used = table[: -(-length // block_size)].long()
        rows = pool[used, LAYER].permute(1, 2, 0, 3, 4).reshape(2, 2, -1, head_dim)
        assert torch.equal(out[:, :, :length], rows[:, :, :length])
        assert untouched(out[:, :, length:])


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, FULL), (96, BRAIN), (256, HALF)], ids=str)
def test_merge_of_parts(memory: Guarded, head_dim: int, dtype: torch.dtype) -> None:
    heads, tokens = 3, 7
    a = memory.given(randn(tokens, heads, head_dim, dtype=dtype))
    b = memory.given(randn(heads, tokens, head_dim, dtype=dtype, seed=1)).transpose(0, 1)
    logs_a = memory.given(randn(tokens, heads, seed=2), shift=1)
    logs_b = memory.given(
        randn(heads, tokens, seed=3), shift=1
    ).T  # heads first, as a library has it
    logs = memory.written(torch.zeros(tokens, heads), shift=1)
    merged = memory.run(merge_attention, a, logs_a, b, logs_b, log_sums=logs)
    share = torch.sigmoid(logs_a - logs_b)[..., None]
    near(merged, a.float() * share + b.float() * (1 - share))
    near(logs, torch.logaddexp(logs_a, logs_b))


@pytest.mark.parametrize("dtype", [FULL, BRAIN], ids=str)
@pytest.mark.parametrize("width", [1, 96, 1000])
@pytest.mark.parametrize("rows", [1, 3])
def test_norms_and_gate(memory: Guarded, rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = randn(rows, width, dtype=dtype), randn(width, dtype=dtype, seed=1)
    before = randn(rows, width, dtype=dtype, seed=2)
    given, given_weight = memory.given(x), memory.given(weight)
    residual = memory.written(before)

    def norm(values: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(values.float(), (width,), weight.float(), 1e-6)

    near(memory.run(rms_norm, given, given_weight, 1e-6), norm(x))
    near(memory.run(add_rms_norm, given, residual, given_weight, 1e-6), norm(x + before))
    near(residual, x + before)
    both = memory.given(randn(rows, 2 * width, dtype=dtype, seed=3))
    gate, up = both.float().chunk(2, 1)
    near(memory.run(silu_mul, both), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize(("head_dim", "block_size", "dtype"), SHAPES, ids=str)
def test_block_copies(memory: Guarded, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    start = torch.full((6, 2, 2, 1, block_size, head_dim), torch.nan, dtype=dtype)
    start[[0, 2]] = randn(2, *start.shape[1:], dtype=dtype)
    pool = memory.written(start)
    copies = [(2, 5, block_size), (0, 4, block_size - 1), (0, 3, 0), (5, 5, 0)]
    given = memory.given(torch.tensor(copies))
    memory.run(copy_block_slots, pool, given)
    wanted = start.clone()
    reference.copy_block_slots(wanted, copies)
    assert torch.equal(bits(pool), bits(wanted))

    extents = memory.fresh(3, *start.shape[1:], dtype=dtype)
    out_ids, in_ids = (memory.given(torch.tensor(ids)) for ids in ([5, -1, 0], [1, -1, 5]))
    memory.run(gather_blocks, pool, out_ids, extents, programs=3)
    assert torch.equal(bits(extents[[0, 2]]), bits(wanted[[5, 0]]))
    assert untouched(extents[1])
    memory.run(scatter_blocks, pool, in_ids, extents, programs=2)
    wanted[[1, 5]] = wanted[[5, 0]]
    assert torch.equal(bits(pool), bits(wanted))


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(torch.int16)


@pytest.mark.parametrize("count", [1, 1023, 1025])
def test_copies_of_words(memory: Guarded, count: int) -> None:
    words = torch.arange(count, dtype=torch.int32)
    target = memory.fresh(count, dtype=torch.int32)
    memory.run(copy_pinned, target, memory.given(words))
    assert target.tolist() == words.tolist()


@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize(
    ("columns", "width", "has_bias"), [(37, 80, True), (32, 64, False), (3, 17, False)]
)
def test_skinny_products(
    memory: Guarded, rows: int, columns: int, width: int, has_bias: bool
) -> None:
    x = memory.given(randn(rows, width, dtype=HALF))
    weight = memory.given(randn(2 * columns, width, dtype=HALF, seed=1) / width**0.5)
    bias = memory.given(randn(2 * columns, dtype=HALF, seed=2)) if has_bias else None
    wanted = torch.nn.functional.linear(
        x.float(), weight.float(), None if bias is None else bias.float()
    )
    out = memory.fresh(rows, 2 * columns, dtype=HALF)
    near(memory.run(skinny_linear, x, weight, bias, out=out), wanted)
    gate, up = wanted.chunk(2, 1)
    gated = memory.run(skinny_gated_linear, x, weight, bias)
    near(gated, torch.nn.functional.silu(gate) * up)
