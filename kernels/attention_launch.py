"""How attention over the pool is run: which tile, how many splits, and the two launches.

Both choices are made on the host from shapes and upper bounds, never from what lies on the device,
so a captured CUDA graph keeps them whatever lengths it is replayed with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sessionkv.kernels.attention_arguments import check_range
from sessionkv.kernels.attention_kernel import attend, merge_splits

_LOG2_E = 1.4426950408889634
MAX_SPLITS = 128
"""Parts of one row that the merging kernel holds in registers at once."""
NARROW_ROWS = 16
"""Rows of the smallest tile, which a product needs; with so few, memory is the bound."""
# Programs wanted for each multiprocessor, by tile. Narrow: two run at once, and twice as many even
# out sequences of unlike lengths. Wide: one or two run at once, and products are the bound.
_NARROW_PROGRAMS, _WIDE_PROGRAMS = 4, 2
# Positions below which a split costs more in merging than it gains.
_NARROW_MIN_SPLIT, _WIDE_MIN_SPLIT = 128, 1024


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


def choose_tile(queries: Tensor, num_rows: int) -> Tile:
    """The tile for sequences of up to ``num_rows`` rows, pairs of (new token, head of the group).

    As many positions as leave room for two narrow programs' stages in a multiprocessor's 227 KiB.
    """
    dims = power_of_2(queries.shape[2])
    if queries.dtype == torch.float32:  # products without tensor cores, from registers
        return Tile(NARROW_ROWS, max(16, min(64, 4096 // dims)), num_warps=4, num_stages=2)
    positions = max(32, min(128, 8192 // dims))
    if num_rows <= NARROW_ROWS:
        return Tile(NARROW_ROWS, positions, num_warps=4, num_stages=3)
    if num_rows <= 64:
        return Tile(64, positions, num_warps=4, num_stages=3)
    return Tile(128, positions, num_warps=8, num_stages=3)


def choose_splits(tile: Tile, num_programs: int, max_positions: int, *, num_sms: int) -> int:
    """Splits of each tile's positions that fill the device: 1 where programs alone do.

    Args:
        tile: The tile.
        num_programs: Programs without splits.
        max_positions: Upper bound of what one tile sees.
        num_sms: Multiprocessors of the device.
    """
    is_narrow = tile.rows <= NARROW_ROWS
    wanted = num_sms * (_NARROW_PROGRAMS if is_narrow else _WIDE_PROGRAMS) // num_programs
    most = max_positions // (_NARROW_MIN_SPLIT if is_narrow else _WIDE_MIN_SPLIT)
    return max(1, min(wanted, most, MAX_SPLITS))


def run_attention(
    queries: Tensor,
    pool: Tensor,
    layer: int,
    *,
    batch: Batch,
    tile: Tile,
    num_splits: int | None,
    out: Tensor,
    log_sums: Tensor | None = None,
) -> None:
    """Launch :func:`~sessionkv.kernels.attention_kernel.attend`, and merge where there are splits.

    Args:
        queries: ``[num_tokens, num_heads, head_dim]``, a token's heads contiguous.
        pool: The pool.
        layer: Index of the layer.
        batch: The step.
        tile: The tile.
        num_splits: None for :func:`choose_splits`.
        out: The result, contiguous. Parts of splits are allocated beside it.
        log_sums: ``[num_tokens, num_heads]`` fp32, contiguous, or None.
    """
    num_tokens, num_heads, head_dim = queries.shape
    _, num_layers, _, kv_heads, block_size, _ = pool.shape
    num_seqs, group = batch.seq_lens.shape[0], num_heads // kv_heads
    if num_tokens == 0 or num_seqs == 0:
        return
    num_tiles, tokens = num_seqs, 1
    if batch.query_starts is not None:
        tokens = tile.rows // group
        # As `attention_kernel.first_tile` counts them where the sequences have all rows.
        num_tiles = max(num_tokens - num_seqs, 0) // tokens + num_seqs
    if num_splits is None:
        seen, window = batch.max_seq_len, batch.window
        num_splits = choose_splits(
            tile,
            num_tiles * kv_heads,
            seen if window is None else min(seen, window + tokens - 1),
            num_sms=_num_sms(queries.device),
        )
    check_range("num_splits", num_splits, 1, MAX_SPLITS)
    parts, part_log_sums = out, log_sums
    if num_splits > 1:
        shape = (num_tokens, num_heads, num_splits)
        parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=queries.device)
        part_log_sums = torch.empty(shape, dtype=torch.float32, device=queries.device)
    dims = power_of_2(head_dim)
    attend[(kv_heads, num_tiles, num_splits)](
        queries, pool, batch.block_tables, batch.query_starts, batch.seq_lens, parts,
        part_log_sums, layer, num_seqs, num_splits, batch.block_tables.shape[1],
        queries.stride(0), head_dim**-0.5 * _LOG2_E,
        KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        BLOCK_STRIDE=num_layers * 2 * kv_heads * block_size * head_dim, WINDOW=batch.window,
        IS_SPLIT=num_splits > 1, ROWS=tile.rows, POSITIONS=tile.positions, DIMS=dims,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        merge_splits[(num_tokens, num_heads)](
            parts, part_log_sums, batch.query_starts, out, log_sums, num_seqs, num_splits,
            HEADS=num_heads, HEAD_DIM=head_dim, MANY=power_of_2(num_splits),
            DIMS=dims, num_warps=4,
        )  # fmt: skip


def power_of_2(n: int) -> int:
    """The least power of 2 that is at least ``n``."""
    return 1 << (n - 1).bit_length()


def _num_sms(device: torch.device) -> int:
    """Multiprocessors; 1 for the interpreter, which runs one program at a time."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
