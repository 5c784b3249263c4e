"""The two Triton kernels of attention over the pool's blocks; `attention_launch.py` calls them.

:func:`attend` serves one query a sequence and ragged chunks alike. A program takes one key head, a
run of consecutive new tokens of one sequence and a part (split) of the positions these see; the
rows of its tile are pairs (token, query head of the group), so that the whole group shares each
key that is read, whatever the ratio. :func:`merge_splits` joins the parts. Online softmax and the
split over keys follow FlashAttention-2 (Dao 2023, section 3) and Flash-Decoding (Dao et al. 2023).

Scores, softmax and sums are fp32, the softmax in base 2. Products of 16-bit inputs run on tensor
cores with probabilities rounded to the inputs' type: within 2e-2 (bf16) or 4e-3 (fp16) of an
exact result for inputs of order 1. Products of fp32 are IEEE: within 2e-5.

Offsets into the pool are 64 bits. Nothing past a sequence's length is read, neither slots nor
entries of the table. Knows nothing of shapes being right: the caller has checked them.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LN_2 = tl.constexpr(0.6931471805599453)
# A finite start for the running maximum: a row that sees nothing keeps it and sums up to 0, where
# an infinite one would give NaN in `maximum - maximum`.
_LOWEST = tl.constexpr(-1.0e30)
# Sequences looked at together when a program looks for its own.
SEARCHED = tl.constexpr(256)


@triton.jit
def first_tile(starts: tl.tensor, seqs: tl.tensor, TOKENS: tl.constexpr) -> tl.tensor:
    """Index of a sequence's first tile: room for as many tiles as its tokens need.

    With ``x = start - seq`` the room of ``q`` tokens is ``(x + q - 1) // T - x // T + 1``, which is
    at least ``ceil(q / T)`` and exactly 1 for one token; a sequence without tokens has 0 or 1.
    """
    return (starts - seqs) // TOKENS + seqs


@triton.jit
def find_sequence(
    query_starts: tl.tensor, num_seqs: tl.tensor, tile: tl.tensor, TOKENS: tl.constexpr
) -> tl.tensor:
    """The sequence that a tile of the ragged batch belongs to: the last one that starts by it."""
    count = 0
    for first in range(0, num_seqs, SEARCHED):
        seqs = first + tl.arange(0, SEARCHED)
        starts = tl.load(query_starts + seqs, mask=seqs < num_seqs, other=0)
        begun = (seqs < num_seqs) & (first_tile(starts, seqs, TOKENS) <= tile)
        count += tl.sum(begun.to(tl.int32))
    return count - 1


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


# What changes from step to step or layer to layer is left out of the choice of a compiled variant,
# so that serving compiles nothing once each kind of step has run.
@triton.jit(
    do_not_specialize=["layer", "num_seqs", "num_splits", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "query_starts", "seq_lens", "log_sums"],
)
def attend(
    queries: tl.tensor,
    pool: tl.tensor,
    block_tables: tl.tensor,
    query_starts: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    log_sums: tl.tensor,
    layer: tl.tensor,
    num_seqs: tl.tensor,
    num_splits: tl.tensor,
    table_stride: tl.tensor,
    query_stride: tl.tensor,
    scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    POSITIONS: tl.constexpr,
    DIMS: tl.constexpr,
) -> None:
    """One key head, ``ROWS // GROUP`` new tokens of one sequence, one split of what they see.

    Grid: (KV_HEADS, tiles, num_splits). Key heads come first because those of one block lie side
    by side in memory; tiles run from last to first because the last rows of a chunk see most.

    Args:
        queries: ``[num_tokens, num_heads, head_dim]``, heads contiguous.
        pool: ``[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]``, contiguous.
        block_tables: ``[num_seqs, table_stride]`` int32.
        query_starts: ``[num_seqs + 1]`` int32, or None: row i is the one query of sequence i.
        seq_lens: ``[num_seqs]`` int32.
        out: One split: the result, ``[num_tokens, num_heads, head_dim]``. Several: fp32 parts,
            ``[num_tokens, num_heads, num_splits, head_dim]``; those of empty splits stay unwritten.
        log_sums: One split: ``[num_tokens, num_heads]`` fp32, natural, or None. Several:
            ``[num_tokens, num_heads, num_splits]`` fp32 in base 2, of an empty split -inf.
        layer: Index of the layer.
        num_seqs: Rows of ``seq_lens``.
        num_splits: Parts that the positions are divided into, evenly for each tile.
        table_stride: Entries from one table to the next.
        query_stride: Elements from one token's queries to the next's.
        scale: Factor of scores, times log2(e).
        KV_HEADS: Key heads.
        GROUP: Query heads of one key head.
        HEAD_DIM: Elements of a head.
        BLOCK_SIZE: Positions of a block.
        BLOCK_STRIDE: Elements of a block over all layers.
        WINDOW: Positions a query sees at most, or None.
        IS_SPLIT: Whether ``num_splits`` is above 1.
        ROWS: Rows of the tile; at least 16, which a product needs.
        POSITIONS: Positions of a turn of the loop.
        DIMS: ``HEAD_DIM`` rounded up to a power of 2.
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    VALUES: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_DIM  # from a key to its value
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    split = tl.program_id(2)
    if query_starts is None:
        seq = tile
        start_row = tile
        num_new = 1
        first_new = 0
    else:
        seq = find_sequence(query_starts, num_seqs, tile, TOKENS)
        start_row = tl.load(query_starts + seq)
        num_new = tl.load(query_starts + seq + 1) - start_row
        first_new = (tile - first_tile(start_row, seq, TOKENS)) * TOKENS
        if first_new >= num_new:
            return
    length = tl.load(seq_lens + seq)
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
    if IS_SPLIT:
        share = tl.cdiv(tl.cdiv(end - begin, POSITIONS), num_splits) * POSITIONS
        begin += split * share
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
                row_positions, scale, True, WINDOW, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, VALUES,
                POSITIONS, DIMS,
            )  # fmt: skip
        clear = tl.maximum(tl.minimum(end, first_position + 1) - clear_begin, 0)
        clear_end = clear_begin + clear // POSITIONS * POSITIONS
        acc, top, total = _scan(
            acc, top, total, query, keys, table, clear_begin, clear_end, row_positions, scale,
            False, WINDOW, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, VALUES, POSITIONS, DIMS,
        )  # fmt: skip
    acc, top, total = _scan(
        acc, top, total, query, keys, table, clear_end, end, row_positions, scale, True, WINDOW,
        HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, VALUES, POSITIONS, DIMS,
    )  # fmt: skip

    is_blind = total == 0.0  # rows that saw nothing give zeros
    total = tl.where(is_blind, 1.0, total)
    acc = acc / total[:, None]
    log_sum = tl.where(is_blind, float("-inf"), top + tl.log2(total))
    cell = token * (KV_HEADS * GROUP) + query_head
    if IS_SPLIT:
        cell = cell * num_splits + split
        tl.store(log_sums + cell, log_sum, mask=is_row)
        cells = cells & (is_blind == 0)[:, None]
    elif log_sums is not None:
        tl.store(log_sums + cell, log_sum * _LN_2, mask=is_row)
    out_cells = cell[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out + out_cells, acc.to(out.dtype.element_ty), mask=cells)


@triton.jit(
    do_not_specialize=["num_seqs", "num_splits"],
    do_not_specialize_on_alignment=["query_starts", "log_sums"],
)
def merge_splits(
    parts: tl.tensor,
    part_log_sums: tl.tensor,
    query_starts: tl.tensor,
    out: tl.tensor,
    log_sums: tl.tensor,
    num_seqs: tl.tensor,
    num_splits: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MANY: tl.constexpr,
    DIMS: tl.constexpr,
) -> None:
    """Join the parts of one token and head, weighted by their sums of exponentials.

    Grid: (num_tokens, HEADS). All parts are read at once, so that it takes one trip to memory; of
    empty splits nothing is read. Rows that no sequence owns are left alone.

    Args:
        parts: As :func:`attend` writes them.
        part_log_sums: Likewise.
        query_starts: As in :func:`attend`.
        out: ``[num_tokens, HEADS, HEAD_DIM]``.
        log_sums: ``[num_tokens, HEADS]`` fp32, natural, or None.
        num_seqs: Sequences of the batch.
        num_splits: Parts.
        HEADS: Query heads.
        HEAD_DIM: Elements of a head.
        MANY: ``num_splits`` rounded up to a power of 2.
        DIMS: ``HEAD_DIM`` rounded up to a power of 2.
    """
    token = tl.program_id(0)
    if query_starts is not None:  # noqa: SIM102 - the outer one is decided when compiling
        if token >= tl.load(query_starts + num_seqs):
            return
    cell = token.to(tl.int64) * HEADS + tl.program_id(1)
    split = tl.arange(0, MANY)
    dim = tl.arange(0, DIMS)
    part = cell * num_splits + split
    logs = tl.load(part_log_sums + part, mask=split < num_splits, other=float("-inf"))
    top = tl.max(logs, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(logs - top)
    present = (weights > 0.0)[:, None] & (dim < HEAD_DIM)[None, :]
    values = tl.load(parts + part[:, None] * HEAD_DIM + dim[None, :], mask=present, other=0.0)
    total = tl.sum(weights, 0)
    is_blind = total == 0.0
    total = tl.where(is_blind, 1.0, total)
    merged = tl.sum(values * weights[:, None], 0) / total
    tl.store(out + cell * HEAD_DIM + dim, merged.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
    if log_sums is not None:
        log_sum = tl.where(is_blind, float("-inf"), top + tl.log2(total))
        tl.store(log_sums + cell, log_sum * _LN_2)
