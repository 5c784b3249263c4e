"""The decoder on a GPU: Llama, Mistral, Qwen2 and Qwen3 in 16 bits over Triton kernels.

The same arithmetic as :mod:`sessionkv.model.decoder`, sums in fp32. One forward pass computes the
new tokens of any number of sequences; their history is in the pool of blocks. In each layer all new
keys and values go into the pool first; only then is anything read, so a sequence may read blocks
that another one of the same batch fills. Everything a pass needs is passed in as device tensors and
nothing is asked of the host, so a pass may be captured in a CUDA graph as it stands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from sessionkv.kernels.fused_norm import add_rms_norm, rms_norm
from sessionkv.kernels.paged_decode import paged_decode
from sessionkv.kernels.paged_prefill import paged_prefill
from sessionkv.kernels.rotary_store import rotate_and_store
from sessionkv.kernels.silu_mul import silu_mul
from sessionkv.model.rope import inverse_frequencies
from sessionkv.model.spec import ModelSpec, RopeSpec
from sessionkv.model.weights import LayerWeights, WeightFiles


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The rows of a step that are one new token each.

    Attributes:
        block_tables: ``[rows, max_blocks]`` int32.
        seq_lens: ``[rows]`` int32: positions with the new one; 0 is a padding row.
        max_seq_len: None of them is above.
    """

    block_tables: Tensor
    seq_lens: Tensor
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The rows of a step that come several to a sequence.

    Attributes:
        block_tables: ``[sequences, max_blocks]`` int32.
        query_starts: ``[sequences + 1]`` int32: first row of each, from 0.
        seq_lens: ``[sequences]`` int32: positions with the new ones.
        max_query_len: Most rows of one.
        max_seq_len: Most positions of one.
    """

    block_tables: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class GpuBatch:
    """One step's rows: first those that decode, then those that prefill.

    Attributes:
        token_ids: ``[num_tokens]`` int64.
        positions: ``[num_tokens]`` int64.
        slots: ``[num_tokens]`` int64: ``block_id * block_size + slot``; -1 writes nothing.
        decode: The first rows, or None.
        prefill: The others, or None.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    decode: DecodeRows | None
    prefill: PrefillRows | None


class GpuDecoder:
    """A loaded model. Not thread-safe; holds no state of any sequence.

    Attributes:
        spec: What the model is made of.
        weights_bytes: Memory of the weights, a tied embedding counted once.
    """

    def __init__(self, spec: ModelSpec, weights: WeightFiles, *, max_model_len: int) -> None:
        """Read the weights, layer by layer, to where ``weights`` puts them.

        Args:
            spec: What the model is made of.
            weights: Where its weights are; rotated partners half a head apart.
            max_model_len: Positions that rotations are computed for.
        """
        self.spec = spec
        self._embedding = weights.embedding()
        self._layers = [weights.layer(index) for index in range(spec.num_layers)]
        self._final_norm = weights.final_norm()
        output = weights.output()
        self._output = self._embedding if output is None else output
        table = cos_sin_table(spec.rope, spec.head_dim, max_model_len)
        self._cos_sin = table.to(self._embedding.device)
        self.weights_bytes = self._embedding.nbytes + (0 if output is None else output.nbytes)
        for layer in self._layers:
            self.weights_bytes += sum(w.nbytes for w in matrices(layer))

    @torch.inference_mode()
    def forward(self, batch: GpuBatch, pool: Tensor) -> Tensor:
        """Compute the new tokens of a step, and write their KV into the pool.

        Args:
            batch: The rows.
            pool: ``[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]``, of the weights'
                dtype.

        Returns:
            Normalised hidden states, ``[num_tokens, hidden]``; see :meth:`logits`.
        """
        spec, eps = self.spec, self.spec.rms_eps
        heads = spec.num_heads + 2 * spec.num_kv_heads
        residual = self._embedding[batch.token_ids]
        x = rms_norm(residual, self._layers[0].input_norm, eps)
        for index, layer in enumerate(self._layers):
            if index:
                x = add_rms_norm(x, residual, layer.input_norm, eps)
            qkv = linear(x, layer.qkv, layer.qkv_bias).view(-1, heads, spec.head_dim)
            queries = rotate_and_store(
                qkv,
                positions=batch.positions,
                slots=batch.slots,
                cos_sin=self._cos_sin,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=eps,
                pool=pool,
                layer=index,
            )
            attended = attend(queries, pool, index, batch, window=spec.windows[index])
            x = linear(attended.view(-1, spec.q_size), layer.o, layer.o_bias)
            x = add_rms_norm(x, residual, layer.post_norm, eps)
            x = silu_mul(linear(x, layer.gate_up, layer.gate_up_bias))
            x = linear(x, layer.down, layer.down_bias)
        return add_rms_norm(x, residual, self._final_norm, eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, *, out: Tensor) -> Tensor:
        """Scores of the next token into ``out``, ``[rows, vocab_size]``, of ``[rows, hidden]``."""
        return torch.mm(hidden, self._output.t(), out=out)


def attend(
    queries: Tensor, pool: Tensor, layer: int, batch: GpuBatch, *, window: int | None
) -> Tensor:
    """Let every query of one layer attend; ``[num_tokens, num_heads, head_dim]`` like ``queries``.

    The new keys and values are in the pool already.
    """
    decode, prefill = batch.decode, batch.prefill
    num_decode = 0 if decode is None else decode.seq_lens.shape[0]
    out = torch.empty_like(queries)
    if decode is not None:
        paged_decode(
            queries[:num_decode],
            pool,
            layer,
            block_tables=decode.block_tables,
            seq_lens=decode.seq_lens,
            max_seq_len=decode.max_seq_len,
            window=window,
            out=out[:num_decode],
        )
    if prefill is not None:
        paged_prefill(
            queries[num_decode:],
            pool,
            layer,
            block_tables=prefill.block_tables,
            query_starts=prefill.query_starts,
            seq_lens=prefill.seq_lens,
            max_query_len=prefill.max_query_len,
            max_seq_len=prefill.max_seq_len,
            window=window,
            out=out[num_decode:],
        )
    return out


def cos_sin_table(rope: RopeSpec, head_dim: int, num_positions: int) -> Tensor:
    """Cosine of each pair, then sine, of every position: ``[num_positions, head_dim]`` fp32."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rope, head_dim)
    return torch.cat([angles.cos(), angles.sin()], dim=1) * rope.attention_factor


def matrices(layer: LayerWeights) -> list[Tensor]:
    """The large tensors of a layer."""
    return [layer.qkv, layer.o, layer.gate_up, layer.down]
