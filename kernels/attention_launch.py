"""How attention over the pool is run: which tile, how many programs, and the launches.

All choices are made on the host from shapes and upper bounds, never from what lies on the device,
so a captured CUDA graph keeps them whatever lengths it is replayed with. How positions are divided
among the programs is decided on the device, from the lengths (:mod:`~sessionkv.kernels.\
attention_work`); that holds for every layer with the same window and can be done once a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from sessionkv.kernels.attention_arguments import check_range
from sessionkv.kernels.attention_kernel import attend, merge_parts
from sessionkv.kernels.attention_work import ITEM, LISTED, list_work
from sessionkv.kernels.early_launch import starts_early

_LOG2_E = 1.4426950408889634
MAX_SPLITS = 128
"""More parts than that of one tile are not asked for."""
NARROW_ROWS = 16
"""Rows of the smallest tile, which a product needs; with so few, memory is the bound."""
# Positions below which a part costs more in merging than it gains.
_NARROW_LEAST, _WIDE_LEAST = 128, 512
# Elements of parts that a merging program reads together: 64 fp32 registers a thread.
_MERGED = 8192


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program works on at a time.

    Attributes:
        rows: Pairs of (new token, query head of the group); a power of 2, at least 16.
        positions: Keys of a turn of the loop; a power of 2, at least 16.
        num_warps: Warps of the program.
        num_stages: Turns of the loop in flight; their keys and values lie in shared memory.
    """

    rows: int
    positions: int
    num_warps: int
    num_stages: int

    @property
    def is_narrow(self) -> bool:
        """Whether memory is the bound."""
        return self.rows <= NARROW_ROWS


@dataclass(frozen=True, slots=True)
class Batch:
    """What the kernels read of a step; all checked.

    Attributes:
        block_tables: ``[num_seqs, max_blocks]`` int32.
        seq_lens: ``[num_seqs]`` int32.
        query_starts: ``[num_seqs + 1]`` int32; None where row i is the one query of sequence i.
        max_seq_len: Upper bound of ``seq_lens``.
        window: Positions a query sees at most; None is all.
    """

    block_tables: Tensor
    seq_lens: Tensor
    query_starts: Tensor | None
    max_seq_len: int
    window: int | None


@dataclass(frozen=True, slots=True)
class Work:
    """Which program does what, for one batch and one window, in any layer.

    Attributes:
        items: ``[num_items, 4]`` int32, see :func:`~sessionkv.kernels.attention_work.list_work`.
        tile: The tile they are made for.
        is_split: Whether some tiles may have several parts.
    """

    items: Tensor
    tile: Tile
    is_split: bool


def choose_tile(queries: Tensor, num_rows: int, num_programs: int) -> Tile:
    """The tile for sequences of up to ``num_rows`` rows, pairs of (new token, head of the group).

    Keys and values of a wide program's stages fill the 227 KiB of a multiprocessor, those of a
    narrow one a third. With a stage more it is half; so that was measured to be a tenth faster
    where there are a few rounds of programs, a little slower where there are many or less than one.

    Args:
        queries: Of the step; only their shape and type are looked at.
        num_rows: Upper bound of the rows of one sequence and key head.
        num_programs: Sequences times key heads.
    """
    dims = power_of_2(queries.shape[2])
    if queries.dtype == torch.float32:  # products without tensor cores, from registers
        return Tile(NARROW_ROWS, max(16, min(64, 4096 // dims)), num_warps=4, num_stages=2)
    positions = max(32, min(128, 8192 // dims))
    if num_rows <= NARROW_ROWS:
        rounds = num_programs / num_sms(queries.device)
        return Tile(NARROW_ROWS, positions, num_warps=4, num_stages=4 if 2 < rounds <= 8 else 3)
    if num_rows <= 64:
        return Tile(64, positions, num_warps=4, num_stages=3)
    return Tile(128, 128 if dims <= 128 else positions, num_warps=8, num_stages=3)


def choose_extra(tile: Tile, kv_heads: int, *, sms: int) -> int:
    """Into how many parts, beyond one for each tile, the work is divided at most.

    Of wide programs a multiprocessor runs one at once, and two narrow ones keep its memory busy. A
    program begins with three loads that wait for each other, while its memory does nothing: twice
    as many parts were measured to be slower by 5 to 10% for 64 sequences, alike or not.
    """
    wanted = 2 if tile.is_narrow else 1
    return max(1, wanted * sms // kv_heads)


def plan_work(
    batch: Batch,
    *,
    num_tokens: int,
    heads: tuple[int, int],
    tile: Tile,
    num_splits: int | None = None,
) -> Work:
    """List the work of a batch on the device.

    Args:
        batch: The step.
        num_tokens: Rows of its queries.
        heads: Query heads and key heads.
        tile: The tile.
        num_splits: Parts of every tile; None is as its length and the other tiles' suggest.
    """
    num_heads, kv_heads = heads
    num_seqs, device = batch.seq_lens.shape[0], batch.seq_lens.device
    tokens = 1 if batch.query_starts is None else tile.rows // (num_heads // kv_heads)
    num_tiles = num_seqs if batch.query_starts is None else 0
    if batch.query_starts is not None:
        # Each sequence's last tile may have a single row.
        num_tiles = max(num_tokens - num_seqs, 0) // tokens + num_seqs
    least = _NARROW_LEAST if tile.is_narrow else _WIDE_LEAST
    extra = choose_extra(tile, kv_heads, sms=num_sms(device))
    # Also where nothing is long enough to be divided: one variant of the kernels to compile less.
    if num_splits is None:
        num_items = num_tiles + extra
    else:
        check_range("num_splits", num_splits, 1, MAX_SPLITS)
        num_items = num_tiles * num_splits
    early = batch.query_starts is None and starts_early(batch.seq_lens)
    items = torch.empty((num_items, ITEM.value), dtype=torch.int32, device=device)
    list_work[(triton.cdiv(num_items, LISTED),)](
        batch.query_starts, batch.seq_lens, items, num_seqs, num_items, extra, num_splits or 0,
        WINDOW=batch.window, TOKENS=tokens, LEAST=least, MULTIPLE=tile.positions, LISTED=LISTED,
        EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return Work(items, tile, is_split=num_splits != 1)


def run_attention(
    queries: Tensor,
    pool: Tensor,
    layer: int,
    *,
    batch: Batch,
    work: Work,
    out: Tensor,
    log_sums: Tensor | None = None,
) -> None:
    """Launch :func:`~sessionkv.kernels.attention_kernel.attend`, and merge where there are parts.

    Args:
        queries: ``[num_tokens, num_heads, head_dim]``, a token's heads contiguous.
        pool: The pool.
        layer: Index of the layer.
        batch: The step.
        work: Of this batch.
        out: The result, contiguous. Parts are allocated beside it.
        log_sums: ``[num_tokens, num_heads]`` fp32, contiguous, or None.
    """
    num_tokens, num_heads, head_dim = queries.shape
    num_blocks, num_layers, _, kv_heads, block_size, _ = pool.shape
    tile, group, num_items = work.tile, num_heads // kv_heads, work.items.shape[0]
    tile_rows = group if batch.query_starts is None else tile.rows // group * group
    dims = power_of_2(head_dim)
    early = starts_early(queries)
    parts, part_log_sums = None, None
    if work.is_split:
        shape = (num_items, kv_heads, tile_rows)
        parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=queries.device)
        part_log_sums = torch.empty(shape, dtype=torch.float32, device=queries.device)
    attend[(kv_heads, num_items)](
        queries, pool, batch.block_tables, batch.query_starts, batch.seq_lens, work.items, out,
        log_sums, parts, part_log_sums, layer, batch.block_tables.shape[1], queries.stride(0),
        head_dim**-0.5 * _LOG2_E, num_blocks, num_tokens,
        KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        BLOCK_STRIDE=num_layers * 2 * kv_heads * block_size * head_dim, WINDOW=batch.window,
        TILE_ROWS=tile_rows, ROWS=tile.rows, POSITIONS=tile.positions, DIMS=dims, EARLY=early,
        num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=early,
    )  # fmt: skip
    if work.is_split:
        rows = min(power_of_2(tile_rows), 4 if tile.is_narrow else 16)
        merge_parts[(kv_heads, num_items, triton.cdiv(tile_rows, rows))](
            parts, part_log_sums, batch.query_starts, work.items, out, log_sums,
            KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, TILE_ROWS=tile_rows, ROWS=rows,
            MANY=max(2, _MERGED // (rows * dims)), DIMS=dims, EARLY=early,
            num_warps=4, launch_pdl=early,
        )  # fmt: skip


def power_of_2(n: int) -> int:
    """The least power of 2 that is at least ``n``."""
    return 1 << (n - 1).bit_length()


def num_sms(device: torch.device) -> int:
    """Multiprocessors; 1 for the interpreter, which runs one program at a time."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
