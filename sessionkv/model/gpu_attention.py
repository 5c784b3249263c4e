"""How the rows of one layer attend on a GPU: which of three ways each of them goes.

| rows | way |
|---|---|
| one new token of a sequence | :func:`~sessionkv.kernels.paged_decode.paged_decode` |
| several, or any of a layer with a sliding window | :func:`~sessionkv.kernels.paged_prefill` |
| thousands, and hundreds that follow thousands of positions | \
:class:`~sessionkv.model.fused_prefill.FusedPrefill`, or both |

Which rows of a prefill go which way is said by :mod:`~sessionkv.model.divided_prefill`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sessionkv.kernels.attention_launch import Work
from sessionkv.kernels.paged_decode import decode_work, paged_decode
from sessionkv.kernels.paged_prefill import paged_prefill, prefill_work
from sessionkv.model.divided_prefill import DividedPrefill, FusedSizes, divide_prefill
from sessionkv.model.fused_prefill import FusedAttention, FusedPrefill, library_for
from sessionkv.model.gpu_batch import GpuBatch, PrefillRows

_WorkKey = tuple[str | int, int | None]


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
    works: dict[_WorkKey, Work] = field(default_factory=dict)


class GpuAttention:
    """The attention of every layer of one model. Not thread-safe: its scratch serves one call."""

    def __init__(
        self,
        *,
        num_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        fused_attention: FusedAttention | None = None,
        sizes: FusedSizes | None = None,
    ) -> None:
        """Allocate the scratch, where there is a library to use it.

        Args:
            num_heads: Query heads of a layer.
            kv_heads: Key heads of a layer.
            head_dim: Elements of a head.
            dtype: Of queries and pool.
            device: Where these are.
            fused_attention: Instead of the library's, which needs 16 bits and at least a Hopper
                GPU.
            sizes: Instead of those measured to be best.
        """
        self._num_heads = num_heads
        self._fused: FusedPrefill | None = None
        attention = fused_attention or library_for(head_dim, dtype, device)
        if attention is not None:
            self._fused = FusedPrefill(
                attention,
                sizes or FusedSizes(),
                kv_heads=kv_heads,
                head_dim=head_dim,
                dtype=dtype,
                device=device,
            )

    def plan_calls(self) -> None:
        """Let the library plan all that it will be called with; it does so for each thread."""
        if self._fused is not None:
            self._fused.plan_calls(self._num_heads)

    def begin(self, batch: GpuBatch, block_size: int) -> AttentionStep:
        """Begin a step: decide which of its rows attend which way."""
        divided, prefill = None, batch.prefill
        if prefill is not None and not prefill.is_bound and self._fused is not None:
            divided = divide_prefill(prefill, self._fused.sizes, block_size=block_size)
        return AttentionStep(batch, divided)

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
            # Also where nothing is merged: one variant of the kernels to compile less.
            logs = torch.empty(rows.shape[:2], dtype=torch.float32, device=rows.device)
            if divided is None or window is not None:
                _attend_paged(
                    rows, pool, layer, step=step, prefill=prefill, window=window, out=to,
                    log_sums=logs,
                )  # fmt: skip
            else:
                self._attend_divided(
                    rows, pool, layer, step=step, divided=divided, out=to, log_sums=logs
                )
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
        log_sums: Tensor,
    ) -> None:
        if self._fused is None:
            raise ValueError("the step was divided for another model")
        for number, part in enumerate(divided.paged):
            _attend_paged(
                queries[part.rows],
                pool,
                layer,
                step=step,
                prefill=part.prefill,
                window=None,
                out=out[part.rows],
                log_sums=log_sums[part.rows],
                key=number,
            )
        self._fused.attend(queries, pool, layer, fused=divided.fused, out=out, log_sums=log_sums)


def _attend_paged(
    queries: Tensor,
    pool: Tensor,
    layer: int,
    *,
    step: AttentionStep,
    prefill: PrefillRows,
    window: int | None,
    out: Tensor,
    log_sums: Tensor,
    key: str | int = "prefill",
) -> None:
    """The paged kernel over the step's prefill, or over a part of it when it is divided."""
    arguments: dict[str, Any] = {
        "block_tables": prefill.block_tables,
        "query_starts": prefill.query_starts,
        "seq_lens": prefill.seq_lens,
        "max_query_len": prefill.max_query_len,
        "max_seq_len": prefill.max_seq_len,
        "window": window,
    }
    if (key, window) not in step.works:
        step.works[key, window] = prefill_work(queries, pool, **arguments)
    work = step.works[key, window]
    paged_prefill(queries, pool, layer, **arguments, work=work, out=out, log_sums=log_sums)
