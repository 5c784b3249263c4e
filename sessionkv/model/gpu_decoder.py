"""The decoder on a GPU: Llama, Mistral, Qwen2 and Qwen3 over Triton kernels.

The same arithmetic as :mod:`sessionkv.model.decoder`, sums in fp32. One forward pass computes the
new tokens of any number of sequences; their history is in the pool of blocks. In each layer all new
keys and values go into the pool first; only then is anything read, so a sequence may read blocks
that another one of the same batch fills. Everything a pass needs is passed in as device tensors and
nothing is asked of the host, so a pass may be captured in a CUDA graph as it stands.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sessionkv.kernels.fused_norm import add_rms_norm, rms_norm
from sessionkv.kernels.rotary_store import rotate_and_store
from sessionkv.model.gpu_attention import GpuAttention
from sessionkv.model.gpu_batch import GpuBatch
from sessionkv.model.gpu_linear import gated_linear, linear
from sessionkv.model.rope import inverse_frequencies
from sessionkv.model.spec import ModelSpec, RopeSpec
from sessionkv.model.weights import LayerWeights, WeightFiles


class GpuDecoder:
    """A loaded model. Not thread-safe; holds no state of any sequence.

    Attributes:
        spec: What the model is made of.
        weights_bytes: Memory of the weights, a tied embedding counted once.
        layer_weights: Elements of a layer's matrices.
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
        self._attention = GpuAttention(
            num_heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=self._embedding.dtype,
            device=self._embedding.device,
        )
        self.weights_bytes = self._embedding.nbytes + (0 if output is None else output.nbytes)
        for layer in self._layers:
            self.weights_bytes += sum(w.nbytes for w in matrices(layer))
        self.layer_weights = sum(w.numel() for w in matrices(self._layers[0]))

    @torch.inference_mode()
    def plan_calls(self) -> None:
        """Let libraries plan, for this thread, what they would otherwise in a step."""
        self._attention.plan_calls()

    @torch.inference_mode()
    def forward(self, batch: GpuBatch, pool: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the new tokens of a step, and write their KV into the pool.

        Of rows that are not wanted the last layer computes keys and values only: a prompt costs a
        layer less.

        Args:
            batch: The rows.
            pool: ``[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]``, of the weights'
                dtype.

        Returns:
            Normalised hidden states of the wanted rows, ``[rows, hidden]``, see :meth:`logits`; and
            ``[num_tokens, any]``, where every row holds a number that is not finite if its KV
            does.
        """
        spec, eps = self.spec, self.spec.rms_eps
        heads = spec.num_heads + 2 * spec.num_kv_heads
        step = self._attention.begin(batch, pool.shape[4])
        residual = self._embedding[batch.token_ids]
        entered: Tensor | None = None
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
            if index == len(self._layers) - 1 and batch.sampled is not None:
                entered, wanted = qkv.flatten(1), batch.sampled
                if not wanted.rows.shape[0]:
                    return residual[:0], entered
                residual, queries = residual[wanted.rows], queries[wanted.rows]
                rows = replace(batch, decode=wanted.last, prefill=None, sampled=None)
                step = self._attention.begin(rows, pool.shape[4])
            attended = self._attention.attend(
                queries, pool, index, step=step, window=spec.windows[index]
            )
            x = linear(attended.view(-1, spec.q_size), layer.o, layer.o_bias)
            x = add_rms_norm(x, residual, layer.post_norm, eps)
            x = gated_linear(x, layer.gate_up, layer.gate_up_bias)
            x = linear(x, layer.down, layer.down_bias)
        hidden = add_rms_norm(x, residual, self._final_norm, eps)
        return hidden, hidden if entered is None else entered

    @torch.inference_mode()
    def logits(self, hidden: Tensor, *, out: Tensor) -> Tensor:
        """Scores of the next token into ``out``, ``[rows, vocab_size]``, of ``[rows, hidden]``."""
        return linear(hidden, self._output, out=out)


def cos_sin_table(rope: RopeSpec, head_dim: int, num_positions: int) -> Tensor:
    """Cosine of each pair, then sine, of every position: ``[num_positions, head_dim]`` fp32."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rope, head_dim)
    return torch.cat([angles.cos(), angles.sin()], dim=1) * rope.attention_factor


def matrices(layer: LayerWeights) -> list[Tensor]:
    """The large tensors of a layer."""
    return [layer.qkv, layer.o, layer.gate_up, layer.down]
