"""The two Triton kernels of attention over the pool's blocks; `attention_launch.py` calls them.

:func:`attend` serves one query a sequence and ragged chunks alike. A program takes one key head, a
run of consecutive new tokens of one sequence and a part of the positions these see, as
:mod:`~sessionkv.kernels.attention_work` lists them; the rows of its tile are pairs (token, query
head of the group), so that the whole group shares each key that is read, whatever the ratio.
:func:`merge_parts` joins the parts. Online softmax and parts of keys follow FlashAttention-2 (Dao
2023, section 3) and Flash-Decoding (Dao et al. 2023).

Scores, softmax and sums are fp32, the softmax in base 2. Products of 16-bit inputs run on tensor
cores with probabilities rounded to the inputs' type: within 2e-2 (bf16) or 4e-3 (fp16) of an
exact result for inputs of order 1. Products of fp32 are IEEE: within 2e-5.

Offsets into the pool are 64 bits. Nothing past a sequence's length is read, neither slots nor
entries of the table. Knows nothing of shapes being right: the caller has checked them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sessionkv.kernels.attention_work import ITEM
from sessionkv.kernels.early_launch import let_next_start, wait_for_earlier

_LN_2 = tl.constexpr(0.6931471805599453)
# A finite start for the running maximum: a row that sees nothing keeps it and sums up to 0, where
# an infinite one would give NaN in `maximum - maximum`.
_LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _scan(
    acc: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    table: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    row_positions: tl.tensor,
    scale: tl.tensor,
    num_blocks: tl.tensor,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    VALUES: tl.constexpr,
    POSITIONS: tl.constexpr,
    DIMS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Let the rows see positions ``begin`` to ``end``; unmasked, a whole number of tiles."""
    lane = tl.arange(0, POSITIONS)
    dim = tl.arange(0, DIMS)
    # Block ids are read one tile ahead: no load of keys then waits for a load of the same turn,
    # and the compiler may prefetch keys as deep as it has stages.
    blocks = tl.load(table + (begin + lane) // BLOCK_SIZE, mask=begin + lane < end, other=0)
    for start in range(begin, end, POSITIONS):
        position = start + lane
        tl.device_assert((blocks >= 0) & (blocks < num_blocks), "a block is not in the pool")
        cells = blocks.to(tl.int64) * BLOCK_STRIDE + position % BLOCK_SIZE * HEAD_DIM
        following = position + POSITIONS
        blocks = tl.load(table + following // BLOCK_SIZE, mask=following < end, other=0)
        cell_keys = keys + cells[:, None] + dim[None, :]
        if MASKED:
            present = (position < end)[:, None] & (dim < HEAD_DIM)[None, :]
            key = tl.load(cell_keys, mask=present, other=0.0)
            value = tl.load(cell_keys + VALUES, mask=present, other=0.0)
        elif HEAD_DIM != DIMS:
            present = (dim < HEAD_DIM)[None, :]
            key = tl.load(cell_keys, mask=present, other=0.0)
            value = tl.load(cell_keys + VALUES, mask=present, other=0.0)
        else:
            key = tl.load(cell_keys)
            value = tl.load(cell_keys + VALUES)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if MASKED:
            seen = (position < end)[None, :] & (position[None, :] <= row_positions[:, None])
            if WINDOW is not None:
                seen = seen & (position[None, :] > row_positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_top[:, None])  # one instruction before the power
        kept = tl.exp2(top - new_top)
        total = total * kept + tl.sum(weights, 1)
        acc = tl.dot(weights.to(value.dtype), value, acc * kept[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def _rows_of(query_starts: tl.tensor, seq: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """First row of a sequence, and how many it has."""
    start_row = seq
    num_new = seq * 0 + 1
    if query_starts is not None:
        start_row = tl.load(query_starts + seq)
        num_new = tl.load(query_starts + seq + 1) - start_row
    return start_row, num_new


# What changes from step to step or layer to layer is left out of the choice of a compiled variant,
# so that serving compiles nothing once each kind of step has run.
@triton.jit(
    do_not_specialize=["layer", "table_stride", "num_blocks", "num_tokens"],
    do_not_specialize_on_alignment=["block_tables", "query_starts", "seq_lens", "log_sums"],
)
def attend(
    queries: tl.tensor,
    pool: tl.tensor,
    block_tables: tl.tensor,
    query_starts: tl.tensor,
    seq_lens: tl.tensor,
    items: tl.tensor,
    out: tl.tensor,
    log_sums: tl.tensor,
    parts: tl.tensor,
    part_log_sums: tl.tensor,
    layer: tl.tensor,
    table_stride: tl.tensor,
    query_stride: tl.tensor,
    scale: tl.tensor,
    num_blocks: tl.tensor,
    num_tokens: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    POSITIONS: tl.constexpr,
    DIMS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One key head, ``ROWS // GROUP`` new tokens of one sequence, one part of what they see.

    Grid: (KV_HEADS, items). Key heads come first because those of one block lie side by side in
    memory; items run from last to first because the last rows of a chunk see most.

    Args:
        queries: ``[num_tokens, num_heads, head_dim]``, heads contiguous.
        pool: ``[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]``, contiguous.
        block_tables: ``[num_seqs, table_stride]`` int32.
        query_starts: ``[num_seqs + 1]`` int32, or None: row i is the one query of sequence i.
        seq_lens: ``[num_seqs]`` int32.
        items: See :func:`~sessionkv.kernels.attention_work.list_work`.
        out: ``[num_tokens, num_heads, head_dim]``: results of tiles of one part.
        log_sums: Their ``[num_tokens, num_heads]`` fp32, natural, or None.
        parts: ``[items, kv_heads, TILE_ROWS, head_dim]`` fp32: results of the other tiles' parts,
            those of empty parts unwritten; None where there are none.
        part_log_sums: Their ``[items, kv_heads, TILE_ROWS]`` fp32 in base 2, of an empty part -inf.
        layer: Index of the layer.
        table_stride: Entries from one table to the next.
        query_stride: Elements from one token's queries to the next's.
        scale: Factor of scores, times log2(e).
        num_blocks: Of the pool.
        num_tokens: Rows of queries.
        KV_HEADS: Key heads.
        GROUP: Query heads of one key head.
        HEAD_DIM: Elements of a head.
        BLOCK_SIZE: Positions of a block.
        BLOCK_STRIDE: Elements of a block over all layers.
        WINDOW: Positions a query sees at most, or None.
        TILE_ROWS: Rows that are used: the group's, for each of the tile's tokens.
        ROWS: Rows of the tile; at least 16, which a product needs.
        POSITIONS: Positions of a turn of the loop.
        DIMS: ``HEAD_DIM`` rounded up to a power of 2.
        EARLY: See :mod:`~sessionkv.kernels.early_launch`.
    """
    let_next_start(EARLY)
    wait_for_earlier(EARLY)
    TOKENS: tl.constexpr = ROWS // GROUP
    VALUES: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_DIM  # from a key to its value
    head = tl.program_id(0)
    item = tl.num_programs(1) - 1 - tl.program_id(1)
    seq = tl.load(items + item * ITEM)
    if seq < 0:
        return
    first_new = tl.load(items + item * ITEM + 1)
    part = tl.load(items + item * ITEM + 2)
    num_parts = tl.load(items + item * ITEM + 3)
    start_row, num_new = _rows_of(query_starts, seq)
    length = tl.load(seq_lens + seq)
    has_rows = (start_row >= 0) & (num_new >= 0) & (start_row + num_new <= num_tokens)
    tl.device_assert(has_rows, "rows of a sequence are not among the queries")
    has_room = (length >= 0) & (length <= table_stride * BLOCK_SIZE)
    tl.device_assert(has_room, "a sequence is longer than its block table")
    first_position = length - num_new + first_new
    last_position = length - num_new + tl.minimum(first_new + TOKENS, num_new) - 1

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    new = first_new + row // GROUP
    is_row = (row < TOKENS * GROUP) & (new < num_new)
    row_positions = length - num_new + new
    token = (start_row + new).to(tl.int64)
    query_head = head * GROUP + row % GROUP
    cells = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    query_cells = token[:, None] * query_stride + query_head[:, None] * HEAD_DIM + dim[None, :]
    query = tl.load(queries + query_cells, mask=cells, other=0.0)

    begin = 0
    if WINDOW is not None:
        begin = tl.maximum(first_position - WINDOW + 1, 0)
    end = last_position + 1
    if parts is not None:
        share = tl.cdiv(tl.cdiv(end - begin, POSITIONS), num_parts) * POSITIONS
        begin += part * share
        end = tl.minimum(begin + share, end)

    keys = pool + (layer.to(tl.int64) * 2 * KV_HEADS + head) * (BLOCK_SIZE * HEAD_DIM)
    table = block_tables + seq.to(tl.int64) * table_stride
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    top = tl.full([ROWS], _LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    # Ranges of positions, and who masks:
    #   begin .. clear_begin      some rows' windows start here    masked (only with a window)
    #   clear_begin .. clear_end  every row sees all of it         free
    #   clear_end .. end          the diagonal, the last tile      masked
    clear_end = begin
    if ROWS > 16:  # few rows are bound by memory, and a loop more would only drain the pipeline
        clear_begin = begin
        if WINDOW is not None:
            hidden = tl.maximum(last_position - WINDOW + 1 - begin, 0)
            clear_begin = begin + tl.cdiv(hidden, POSITIONS) * POSITIONS
            acc, top, total = _scan(
                acc, top, total, query, keys, table, begin, tl.minimum(clear_begin, end),
                row_positions, scale, num_blocks, True, WINDOW, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE,
                VALUES, POSITIONS, DIMS,
            )  # fmt: skip
        clear = tl.maximum(tl.minimum(end, first_position + 1) - clear_begin, 0)
        clear_end = clear_begin + clear // POSITIONS * POSITIONS
        acc, top, total = _scan(
            acc, top, total, query, keys, table, clear_begin, clear_end, row_positions, scale,
            num_blocks, False, WINDOW, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, VALUES, POSITIONS, DIMS,
        )  # fmt: skip
    acc, top, total = _scan(
        acc, top, total, query, keys, table, clear_end, end, row_positions, scale, num_blocks,
        True, WINDOW, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, VALUES, POSITIONS, DIMS,
    )  # fmt: skip

    is_blind = total == 0.0  # rows that saw nothing give zeros
    total = tl.where(is_blind, 1.0, total)
    acc = acc / total[:, None]
    log_sum = tl.where(is_blind, float("-inf"), top + tl.log2(total))
    cell = token * (KV_HEADS * GROUP) + query_head
    is_whole = True
    if parts is not None:
        is_whole = num_parts == 1
        if num_parts > 1:
            part_cell = (item * KV_HEADS + head).to(tl.int64) * TILE_ROWS + row
            tl.store(part_log_sums + part_cell, log_sum, mask=is_row)
            part_cells = part_cell[:, None] * HEAD_DIM + dim[None, :]
            tl.store(parts + part_cells, acc, mask=cells & (is_blind == 0)[:, None])
    if is_whole:
        out_cells = cell[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out + out_cells, acc.to(out.dtype.element_ty), mask=cells)
        if log_sums is not None:
            tl.store(log_sums + cell, log_sum * _LN_2, mask=is_row)


@triton.jit(do_not_specialize_on_alignment=["query_starts", "log_sums"])
def merge_parts(
    parts: tl.tensor,
    part_log_sums: tl.tensor,
    query_starts: tl.tensor,
    items: tl.tensor,
    out: tl.tensor,
    log_sums: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    MANY: tl.constexpr,
    DIMS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Join the parts of some rows of a tile, weighted by their sums of exponentials.

    Grid: (KV_HEADS, items, tiles of ``ROWS`` rows). The programs of a tile's first item do it; all
    others, and those of tiles of one part, end at once. ``MANY`` parts are read together; of empty
    ones nothing is read.

    Args:
        parts: As :func:`attend` writes them.
        part_log_sums: Likewise.
        query_starts: As in :func:`attend`.
        items: Likewise.
        out: ``[num_tokens, num_heads, HEAD_DIM]``.
        log_sums: ``[num_tokens, num_heads]`` fp32, natural, or None.
        KV_HEADS: Key heads.
        GROUP: Query heads of one key head.
        HEAD_DIM: Elements of a head.
        TILE_ROWS: Rows of a tile of :func:`attend`, a multiple of ``GROUP``.
        ROWS: Rows of a program.
        MANY: Parts of a turn of the loop.
        DIMS: ``HEAD_DIM`` rounded up to a power of 2.
        EARLY: See :mod:`~sessionkv.kernels.early_launch`.
    """
    let_next_start(EARLY)
    wait_for_earlier(EARLY)
    head = tl.program_id(0)
    item = tl.program_id(1)
    seq = tl.load(items + item * ITEM)
    first_new = tl.load(items + item * ITEM + 1)
    part = tl.load(items + item * ITEM + 2)
    num_parts = tl.load(items + item * ITEM + 3)
    if (seq < 0) | (part > 0) | (num_parts < 2):
        return
    start_row, num_new = _rows_of(query_starts, seq)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    new = first_new + row // GROUP
    is_row = (row < TILE_ROWS) & (new < num_new)
    if tl.sum(is_row.to(tl.int32)) == 0:
        return
    lane = tl.arange(0, MANY)
    dim = tl.arange(0, DIMS)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    top = tl.full([ROWS], _LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, num_parts, MANY):
        slot = (item + first + lane).to(tl.int64) * KV_HEADS + head
        cell = slot[None, :] * TILE_ROWS + row[:, None]
        present = is_row[:, None] & (first + lane < num_parts)[None, :]
        logs = tl.load(part_log_sums + cell, mask=present, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(logs, 1))
        weights = tl.exp2(logs - new_top[:, None])
        kept = tl.exp2(top - new_top)
        read = (weights > 0.0)[:, :, None] & (dim < HEAD_DIM)[None, None, :]
        cells = cell[:, :, None] * HEAD_DIM + dim[None, None, :]
        values = tl.load(parts + cells, mask=read, other=0.0)
        acc = acc * kept[:, None] + tl.sum(values * weights[:, :, None], 1)
        total = total * kept + tl.sum(weights, 1)
        top = new_top
    is_blind = total == 0.0
    total = tl.where(is_blind, 1.0, total)
    token = (start_row + new).to(tl.int64)
    cell_out = token * (KV_HEADS * GROUP) + head * GROUP + row % GROUP
    merged = acc / total[:, None]
    out_cells = cell_out[:, None] * HEAD_DIM + dim[None, :]
    in_out = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(out + out_cells, merged.to(out.dtype.element_ty), mask=in_out)
    if log_sums is not None:
        log_sum = tl.where(is_blind, float("-inf"), top + tl.log2(total))
        tl.store(log_sums + cell_out, log_sum * _LN_2, mask=is_row)
