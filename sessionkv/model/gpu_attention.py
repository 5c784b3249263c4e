"""How the rows of one layer attend on a GPU: which of three ways each of them goes.

| rows | way |
|---|---|
| one new token of a sequence | :func:`~sessionkv.kernels.paged_decode.paged_decode` |
| several, or any of a layer with a sliding window | :func:`~sessionkv.kernels.paged_prefill` |
| hundreds that follow thousands of positions | both of the next two, merged |

Hundreds of rows are bound by products, of which a library's attention over contiguous keys does
about 1.5 times as many a second as the paged kernel. So the keys before such rows are copied out of
the pool, thousands at a time into the same scratch, and attended to in full by the library; what
remains, the newest keys and the rows' own, is left to the paged kernel. Parts are merged by their
sums of exponentials.

The library plans every new shape anew, for tens of milliseconds, and never forgets one. Therefore
it is only called with few shapes: always :attr:`FusedSizes.rows` queries, over keys of the sizes
:attr:`FusedSizes.pieces`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sessionkv.kernels.attention_launch import Work
from sessionkv.kernels.attention_parts import gather_kv_layer, merge_attention
from sessionkv.kernels.paged_decode import decode_work, paged_decode
from sessionkv.kernels.paged_prefill import paged_prefill, prefill_work
from sessionkv.model.gpu_batch import GpuBatch, PrefillRows

FullAttention = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Every query sees every key: of ``[rows, num_heads, head_dim]``, and keys and values
``[kv_heads, positions, head_dim]``, the result like the queries and the natural logarithms of the
sums of exponentials, ``[rows, num_heads]`` fp32."""

_MAX_HEAD_DIM = 128
"""Wider heads are not what the library is fast at."""
_HOPPER = (9, 0)


@dataclass(frozen=True, slots=True)
class FusedSizes:
    """What the library is called with, and from where on.

    Attributes:
        rows: Queries of every call: fewer leave multiprocessors idle, as a tile of one head has
            128 and models have tens of heads.
        min_rows: With fewer that are wanted, the paged kernel is as fast.
        pieces: Numbers of keys, halving. A multiple of the last is attended to this way, any rest
            is the paged kernel's. Keys and values of the first still fit into an L2 cache.
    """

    rows: int = 512
    min_rows: int = 384
    pieces: tuple[int, ...] = (8192, 4096, 2048)


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring rows of one sequence that go the same way.

    Attributes:
        sequence: Its index among those of the step's prefill.
        first_row: Among all rows of the prefill.
        num_rows: Rows.
        length: Positions up to the last row's own.
        covered: Of these, the first ones that the library attends to; 0 is none.
    """

    sequence: int
    first_row: int
    num_rows: int
    length: int
    covered: int


@dataclass(frozen=True, slots=True)
class DividedPrefill:
    """A step's prefill as all layers without a window compute it.

    Attributes:
        rest: What the paged kernel does: each piece as a sequence that starts at the first
            position that is not covered.
        long: For each sequence with covered positions, its block table and its pieces.
    """

    rest: PrefillRows
    long: tuple[tuple[Tensor, tuple[Piece, ...]], ...]


@dataclass(slots=True)
class AttentionStep:
    """What the layers of one step have in common; filled by the first that needs it.

    Attributes:
        batch: The step's rows.
        divided: Its prefill, where some of it attends through the library.
        works: How programs share the work, by what it is of and window.
    """

    batch: GpuBatch
    divided: DividedPrefill | None
    works: dict[tuple[str, int | None], Work] = field(default_factory=dict)


def divide_rows(lengths: Sequence[tuple[int, int]], sizes: FusedSizes) -> list[Piece]:
    """Cut the rows of each sequence where another number of positions is covered.

    Args:
        lengths: Rows and positions of each sequence.
        sizes: Of what is covered.
    """
    pieces: list[Piece] = []
    first_row = 0
    for sequence, (rows, length) in enumerate(lengths):
        start, begin = length - rows, 0  # `begin`: where rows that are not covered started
        for row in range(0, rows, sizes.rows):
            count = min(sizes.rows, rows - row)
            covered = (start + row) // sizes.pieces[-1] * sizes.pieces[-1]
            if count < sizes.min_rows or not covered:
                continue
            if begin < row:
                before = row - begin
                pieces.append(Piece(sequence, first_row + begin, before, start + row, 0))
            begin = row + count
            pieces.append(Piece(sequence, first_row + row, count, start + begin, covered))
        if begin < rows:
            pieces.append(Piece(sequence, first_row + begin, rows - begin, length, 0))
        first_row += rows
    return pieces


class GpuAttention:
    """The attention of every layer of one model. Not thread-safe: its scratch serves one call."""

    def __init__(
        self,
        *,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        full_attention: FullAttention | None = None,
        sizes: FusedSizes | None = None,
    ) -> None:
        """Allocate the scratch, where there is a library to use it.

        Args:
            kv_heads: Key heads of a layer.
            head_dim: Elements of a head.
            dtype: Of queries and pool.
            device: Where these are.
            full_attention: Instead of the library's, which needs 16 bits and a Hopper GPU at least.
            sizes: Instead of those measured to be best.
        """
        self._sizes = sizes or FusedSizes()
        self._full_attention = full_attention or _library_for(head_dim, dtype, device)
        self._scratch: Tensor | None = None
        if self._full_attention is not None:
            shape = (2, kv_heads, self._sizes.pieces[0], head_dim)
            self._scratch = torch.empty(shape, dtype=dtype, device=device)

    def begin(self, batch: GpuBatch, block_size: int) -> AttentionStep:
        """Begin a step: decide which of its rows attend which way."""
        return AttentionStep(batch, self._divide(batch.prefill, block_size))

    def _divide(self, prefill: PrefillRows | None, block_size: int) -> DividedPrefill | None:
        """Which rows attend through the library; None where none do."""
        if prefill is None or prefill.is_bound or self._scratch is None:
            return None
        pieces = divide_rows(prefill.lengths, self._sizes)
        if not any(piece.covered for piece in pieces):
            return None
        long = []
        for sequence in range(len(prefill.lengths)):
            of_sequence = tuple(p for p in pieces if p.sequence == sequence and p.covered)
            if of_sequence:
                long.append((prefill.block_tables[sequence], of_sequence))
        return DividedPrefill(_rest(prefill, pieces, block_size), tuple(long))

    def attend(
        self,
        queries: Tensor,
        pool: Tensor,
        layer: int,
        *,
        step: AttentionStep,
        window: int | None,
    ) -> Tensor:
        """Let every query of one layer attend; its new keys and values are in the pool already.

        Args:
            queries: ``[num_tokens, num_heads, head_dim]``, contiguous.
            pool: ``[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]``.
            layer: Index of the layer.
            step: From :meth:`begin`.
            window: Positions a query sees at most, itself included; None is all.

        Returns:
            A new tensor like ``queries``.
        """
        decode, prefill, divided = step.batch.decode, step.batch.prefill, step.divided
        num_decode = 0 if decode is None else decode.seq_lens.shape[0]
        has_padding = prefill is not None and prefill.is_bound
        # Padding rows go on as numbers, not as whatever the memory holds.
        out = torch.zeros_like(queries) if has_padding else torch.empty_like(queries)
        if decode is not None:
            arguments: dict[str, Any] = {
                "block_tables": decode.block_tables,
                "seq_lens": decode.seq_lens,
                "max_seq_len": decode.max_seq_len,
                "window": window,
            }
            rows, key = queries[:num_decode], ("decode", window)
            if key not in step.works:
                step.works[key] = decode_work(rows, pool, **arguments)
            work = step.works[key]
            paged_decode(rows, pool, layer, **arguments, work=work, out=out[:num_decode])
        if prefill is not None:
            rows, to = queries[num_decode:], out[num_decode:]
            if divided is None or window is not None:
                _attend_paged(rows, pool, layer, step=step, prefill=prefill, window=window, out=to)
            else:
                self._attend_divided(rows, pool, layer, step=step, divided=divided, out=to)
        return out

    def _attend_divided(
        self,
        queries: Tensor,
        pool: Tensor,
        layer: int,
        *,
        step: AttentionStep,
        divided: DividedPrefill,
        out: Tensor,
    ) -> None:
        logs = torch.empty(queries.shape[:2], dtype=torch.float32, device=queries.device)
        _attend_paged(
            queries,
            pool,
            layer,
            step=step,
            prefill=divided.rest,
            window=None,
            out=out,
            log_sums=logs,
        )
        missing = self._sizes.rows - queries.shape[0]
        if missing > 0:
            queries = torch.cat([queries, queries[:missing]])
        scratch, block_size = self._scratch, pool.shape[4]
        if scratch is None:
            raise ValueError("the step was divided for another model")
        for table, pieces in divided.long:
            end = max(piece.covered for piece in pieces)
            for begin in range(0, end, scratch.shape[2]):
                keys_values = scratch[:, :, : min(scratch.shape[2], end - begin)]
                gather_kv_layer(
                    pool,
                    layer,
                    block_table=table[begin // block_size :],
                    num_tokens=keys_values.shape[2],
                    out=keys_values,
                )
                for piece in pieces:
                    covered = min(piece.covered - begin, keys_values.shape[2])
                    if covered > 0:
                        self._add_parts(queries, piece, keys_values[:, :, :covered], out, logs)

    def _add_parts(
        self, queries: Tensor, piece: Piece, keys_values: Tensor, out: Tensor, logs: Tensor
    ) -> None:
        """Merge what the rows of a piece see in some positions, a multiple of the last size."""
        if self._full_attention is None:
            raise ValueError("the step was divided for another model")
        # As many rows as every call has; the results of its neighbours are not used.
        first = min(piece.first_row, queries.shape[0] - self._sizes.rows)
        rows = slice(piece.first_row, piece.first_row + piece.num_rows)
        used = slice(rows.start - first, rows.stop - first)
        window = queries[first : first + self._sizes.rows]
        for part in _parts(keys_values.shape[2], self._sizes.pieces):
            keys, values = keys_values[:, :, part]
            found, found_logs = self._full_attention(window, keys, values)
            merge_attention(
                out[rows],
                logs[rows],
                found[used],
                found_logs[used],
                out=out[rows],
                log_sums=logs[rows],
            )


def _parts(num_positions: int, sizes: Sequence[int]) -> Iterator[slice]:
    """Consecutive parts of so many positions, the largest first."""
    begin = 0
    for size in sizes:
        while num_positions - begin >= size:
            yield slice(begin, begin + size)
            begin += size


def _rest(prefill: PrefillRows, pieces: Sequence[Piece], block_size: int) -> PrefillRows:
    """The pieces as sequences without the positions that are covered."""
    device = prefill.seq_lens.device
    numbers = [
        [piece.sequence for piece in pieces] + [0],
        [piece.covered // block_size for piece in pieces] + [0],
        [piece.length - piece.covered for piece in pieces] + [0],
        [piece.first_row for piece in pieces] + [pieces[-1].first_row + pieces[-1].num_rows],
    ]
    # Pinned and not waited for: the host may be a step ahead of the device.
    host = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
    sequences, first_blocks, seq_lens, starts = host.to(device, non_blocking=True)
    lengths = tuple((piece.num_rows, piece.length - piece.covered) for piece in pieces)
    width = -(-max(positions for _, positions in lengths) // block_size)
    blocks = first_blocks[:-1, None] + torch.arange(width, dtype=torch.int32, device=device)
    blocks.clamp_(max=prefill.block_tables.shape[1] - 1)  # what is past a length is not read
    tables = prefill.block_tables[sequences[:-1, None], blocks]
    return PrefillRows(tables, starts, seq_lens[:-1], lengths)


def _attend_paged(
    queries: Tensor,
    pool: Tensor,
    layer: int,
    *,
    step: AttentionStep,
    prefill: PrefillRows,
    window: int | None,
    out: Tensor,
    log_sums: Tensor | None = None,
) -> None:
    """The paged kernel over the step's prefill, or over what is left of it when it is divided."""
    arguments: dict[str, Any] = {
        "block_tables": prefill.block_tables,
        "query_starts": prefill.query_starts,
        "seq_lens": prefill.seq_lens,
        "max_query_len": prefill.max_query_len,
        "max_seq_len": prefill.max_seq_len,
        "window": window,
    }
    key = ("prefill" if prefill is step.batch.prefill else "rest", window)
    if key not in step.works:
        step.works[key] = prefill_work(queries, pool, **arguments)
    work = step.works[key]
    paged_prefill(queries, pool, layer, **arguments, work=work, out=out, log_sums=log_sums)


def _library_for(head_dim: int, dtype: torch.dtype, device: torch.device) -> FullAttention | None:
    """The library's attention where it is faster than the paged kernel."""
    if device.type != "cuda" or dtype == torch.float32 or head_dim > _MAX_HEAD_DIM:
        return None
    return cudnn_attention if torch.cuda.get_device_capability(device) >= _HOPPER else None


def cudnn_attention(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The fused attention of cuDNN, as a :data:`FullAttention`; 16 bits, on a CUDA device."""
    out, logs, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries.transpose(0, 1)[None], keys[None], values[None], None, True
    )
    return out[0].transpose(0, 1), logs.view(queries.shape[1], -1).T
