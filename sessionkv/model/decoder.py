"""The decoder: Llama, Mistral, Qwen2 and Qwen3 in fp32 on the CPU.

Pre-norm transformer with rotary positions, grouped-query attention and a gated MLP. One forward
pass computes the new tokens of any number of sequences; their history is in the pool of blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sessionkv.kernels.linear import Linear, pack
from sessionkv.kernels.norm import RMSNorm, rms_norm
from sessionkv.model.attention import AttentionBatch, attend, write_mirrored
from sessionkv.model.rope import rotate_, rotation_table
from sessionkv.model.spec import ModelSpec
from sessionkv.model.weights import LayerWeights, WeightFiles


class _Layer:
    """One layer's projections, packed for the CPU."""

    __slots__ = ("down", "gate_up", "input_norm", "k_norm", "o", "post_norm", "q_norm", "qkv")

    def __init__(self, weights: LayerWeights, eps: float, *, blas: bool) -> None:
        self.input_norm = rms_norm(weights.input_norm, eps)
        self.post_norm = rms_norm(weights.post_norm, eps)
        self.q_norm = _optional_norm(weights.q_norm, eps)
        self.k_norm = _optional_norm(weights.k_norm, eps)
        self.qkv: Linear = pack(weights.qkv, weights.qkv_bias, blas=blas)
        self.o: Linear = pack(weights.o, weights.o_bias, blas=blas)
        self.gate_up: Linear = pack(weights.gate_up, weights.gate_up_bias, blas=blas)
        self.down: Linear = pack(weights.down, weights.down_bias, blas=blas)


def _optional_norm(weight: Tensor | None, eps: float) -> RMSNorm | None:
    return None if weight is None else rms_norm(weight, eps)


class Decoder:
    """A loaded model. Not thread-safe; holds no state of any sequence."""

    def __init__(
        self, spec: ModelSpec, weights: WeightFiles, *, max_model_len: int, blas: bool = False
    ) -> None:
        """Read and pack the weights, layer by layer.

        Args:
            spec: What the model is made of.
            weights: Where its weights are.
            max_model_len: Positions that rotations are computed for.
            blas: Which way products go; see :mod:`sessionkv.kernels.linear`.
        """
        self.spec = spec
        self._embedding = weights.embedding()
        self._layers = [
            _Layer(weights.layer(index), spec.rms_eps, blas=blas)
            for index in range(spec.num_layers)
        ]
        self._final_norm = rms_norm(weights.final_norm(), spec.rms_eps)
        output = weights.output()
        self._output = pack(self._embedding if output is None else output, blas=blas)
        self._rotations = rotation_table(spec.rope, spec.head_dim, max_model_len)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, *, pool: Tensor, batch: AttentionBatch) -> Tensor:
        """Compute the new tokens of a step, and write their KV into the pool.

        Args:
            token_ids: ``[num_tokens]`` int64.
            pool: ``[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]`` fp32.
            batch: Positions, slots and sequences of the rows.

        Returns:
            Normalised hidden states, ``[num_tokens, hidden]``; see :meth:`logits`.
        """
        spec = self.spec
        num_tokens = token_ids.shape[0]
        heads = spec.num_heads + 2 * spec.num_kv_heads
        rotations = self._rotations[batch.positions][:, None]
        x = self._embedding[token_ids]
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.input_norm(x)).view(num_tokens, heads, spec.head_dim)
            self._normalise_heads(qkv, layer)
            rotate_(qkv[:, : spec.num_heads + spec.num_kv_heads], rotations)
            attended = attend(index, qkv, pool=pool, batch=batch, window=spec.windows[index])
            x = layer.o.plus(attended, x)
            gate, up = layer.gate_up(layer.post_norm(x)).chunk(2, dim=-1)
            x = layer.down.plus(functional.silu(gate).mul_(up), x)
        if batch.is_mirrored:
            write_mirrored(pool, batch)
        return self._final_norm(x)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token: ``[rows, vocab_size]`` fp32 from ``[rows, hidden]``."""
        return self._output(hidden)

    @property
    def nbytes(self) -> int:
        """Memory of the weights as packed, a shared embedding counted twice (it is stored so)."""
        total = self._embedding.nbytes + self._output.nbytes
        for layer in self._layers:
            total += layer.qkv.nbytes + layer.o.nbytes + layer.gate_up.nbytes + layer.down.nbytes
        return total

    def _normalise_heads(self, qkv: Tensor, layer: _Layer) -> None:
        """RMS-normalise queries and keys per head, in place, where the family does."""
        if layer.q_norm is None or layer.k_norm is None:
            return
        spec = self.spec
        queries = qkv[:, : spec.num_heads]
        keys = qkv[:, spec.num_heads : spec.num_heads + spec.num_kv_heads]
        queries.copy_(layer.q_norm(queries))
        keys.copy_(layer.k_norm(keys))
