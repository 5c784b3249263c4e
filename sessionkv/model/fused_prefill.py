"""Prefill through a library's attention over contiguous keys.

Hundreds of rows are bound by products, of which such a library does about 1.7 times as many a
second as the paged kernel. So the keys that the rows see are copied out of the pool, thousands at a
time into the same scratch, and what a piece of rows sees in several of these, or through the paged
kernel, is merged by the sums of exponentials.

The library plans every new shape anew for each thread, for tens of milliseconds, and never forgets
one. Therefore it is only called with the few shapes of
:meth:`~sessionkv.model.divided_prefill.FusedSizes.calls`, which a thread can plan before its first
step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sessionkv.kernels.attention_parts import gather_kv_layer, merge_attention
from sessionkv.model.divided_prefill import FusedSizes, Piece

_MAX_HEAD_DIM = 128
"""Wider heads are not what the library is fast at."""
_HOPPER = (9, 0)

_Result = tuple[Tensor, Tensor]


class FusedAttention(Protocol):
    """An attention over contiguous keys."""

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            queries: ``[rows, num_heads, head_dim]``.
            keys: ``[kv_heads, positions, head_dim]``.
            values: Likewise.
            causal: There are as many rows as positions, and row i sees the first ``i + 1`` of
                them; otherwise every row sees all.

        Returns:
            The result like the queries, and the natural logarithms of the sums of exponentials,
            ``[rows, num_heads]`` fp32, of any strides.
        """
        ...


def cudnn_attention(
    queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """The attention of cuDNN, as a :class:`FusedAttention`; 16 bits, on a CUDA device."""
    out, logs, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries.transpose(0, 1)[None], keys[None], values[None], None, True, 0.0, causal
    )
    return out[0].transpose(0, 1), logs.view(queries.shape[1], -1).T


def library_for(head_dim: int, dtype: torch.dtype, device: torch.device) -> FusedAttention | None:
    """The library's attention where it is faster than the paged kernel."""
    if device.type != "cuda" or dtype == torch.float32 or head_dim > _MAX_HEAD_DIM:
        return None
    return cudnn_attention if torch.cuda.get_device_capability(device) >= _HOPPER else None


class FusedPrefill:
    """What the library computes of each layer. Not thread-safe: its scratch serves one call.

    Attributes:
        sizes: What the library is called with.
    """

    def __init__(
        self,
        attention: FusedAttention,
        sizes: FusedSizes,
        *,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the scratch.

        Args:
            attention: The library's.
            sizes: What it is called with.
            kv_heads: Key heads of a layer.
            head_dim: Elements of a head.
            dtype: Of queries and pool.
            device: Where these are.
        """
        self.sizes = sizes
        self._attention = attention
        shape = (2, kv_heads, sizes.pieces[0], head_dim)
        self._scratch = torch.zeros(shape, dtype=dtype, device=device)

    def plan_calls(self, num_heads: int) -> None:
        """Call the library once with each size, on zeros, so that this thread has planned them."""
        scratch, most = self._scratch, max(self.sizes.rows, *self.sizes.squares)
        queries = scratch.new_zeros((most, num_heads, scratch.shape[3]))
        for rows, positions, causal in self.sizes.calls():
            keys, values = scratch[:, :, :positions]
            self._attention(queries[:rows], keys, values, causal=causal)

    def attend(
        self,
        queries: Tensor,
        pool: Tensor,
        layer: int,
        *,
        fused: Sequence[tuple[Tensor, Sequence[Piece]]],
        out: Tensor,
        log_sums: Tensor,
    ) -> None:
        """Add to a prefill what the library computes of it.

        Args:
            queries: ``[num_tokens, num_heads, head_dim]``, contiguous.
            pool: ``[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]``.
            layer: Index of the layer.
            fused: Of each sequence its block table and its pieces, none without anything to do.
            out: ``[num_tokens, num_heads, head_dim]``, contiguous: what rows of pieces that are no
                squares see of what is not covered; becomes what all rows see.
            log_sums: ``[num_tokens, num_heads]`` fp32, contiguous: the natural logarithms of the
                sums of exponentials; becomes anything.
        """
        missing = self.sizes.rows - queries.shape[0]
        if missing > 0:
            queries = torch.cat([queries, queries[:missing]])
        for table, pieces in fused:
            found: dict[Piece, _Result] = {}
            for piece in pieces:
                if piece.is_square:
                    own = self._gather(pool, layer, table, piece.covered, piece.length)
                    found[piece] = self._attention(queries[piece.rows], *own, causal=True)
                else:
                    found[piece] = out[piece.rows], log_sums[piece.rows]
            end, room = max(piece.covered for piece in pieces), self._scratch.shape[2]
            for begin in range(0, end, room):
                held = self._gather(pool, layer, table, begin, min(begin + room, end))
                for piece in pieces:
                    seen = held[:, :, : max(0, piece.covered - begin)]
                    for keys, values in _parts(seen, self.sizes.pieces):
                        part = self._full(queries, piece, keys, values)
                        to = out[piece.rows], log_sums[piece.rows]
                        merge_attention(*found[piece], *part, out=to[0], log_sums=to[1])
                        found[piece] = to
            for piece in pieces:
                if not piece.covered:
                    out[piece.rows] = found[piece][0]

    def _gather(self, pool: Tensor, layer: int, table: Tensor, begin: int, end: int) -> Tensor:
        """Copy keys and values of some positions: ``[2, kv_heads, end - begin, head_dim]``."""
        held = self._scratch[:, :, : end - begin]
        blocks = table[begin // pool.shape[4] :]
        gather_kv_layer(pool, layer, block_table=blocks, num_tokens=end - begin, out=held)
        return held

    def _full(self, queries: Tensor, piece: Piece, keys: Tensor, values: Tensor) -> _Result:
        """What the rows of a piece see in some positions, all of which are before them."""
        if piece.is_square:
            return self._attention(queries[piece.rows], keys, values, causal=False)
        # As many rows as every call has; the results of the piece's neighbours are not used.
        count = self.sizes.rows
        first = min(piece.first_row, queries.shape[0] - count)
        found, logs = self._attention(queries[first : first + count], keys, values, causal=False)
        used = slice(piece.first_row - first, piece.first_row - first + piece.num_rows)
        return found[used], logs[used]


def _parts(keys_values: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """Consecutive parts of so many positions, the largest first."""
    begin = 0
    for size in sizes:
        while keys_values.shape[2] - begin >= size:
            yield keys_values[:, :, begin : begin + size]
            begin += size
