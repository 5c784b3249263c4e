"""Weights of a decoder: which tensors there must be, and loading them into fused matrices.

Names and shapes are checked from the headers alone, so that a broken folder is refused before
anything is allocated. Loading copies each tensor straight from the mapped file into its place.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sessionkv.errors import ModelBroken
from sessionkv.model.spec import ModelSpec
from sessionkv.model.tensor_files import TensorEntry, list_tensors

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, row-major ``[out, in]``. A bias or head norm that is absent is None.

    Attributes:
        qkv: ``[(num_heads + 2 * num_kv_heads) * head_dim, hidden]``: queries, keys, values.
        o: ``[hidden, num_heads * head_dim]``.
        gate_up: ``[2 * intermediate, hidden]``: gate, then up.
        down: ``[hidden, intermediate]``.
        q_norm, k_norm: ``[head_dim]``, with the same pairing of dimensions as ``qkv``.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor the decoder needs."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for index in range(spec.num_layers):
        layer = f"model.layers.{index}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        projections = {
            "self_attn.q_proj": (spec.q_size, hidden, spec.qkv_bias),
            "self_attn.k_proj": (spec.kv_size, hidden, spec.qkv_bias),
            "self_attn.v_proj": (spec.kv_size, hidden, spec.qkv_bias),
            "self_attn.o_proj": (hidden, spec.q_size, spec.o_bias),
            "mlp.gate_proj": (inner, hidden, spec.mlp_bias),
            "mlp.up_proj": (inner, hidden, spec.mlp_bias),
            "mlp.down_proj": (hidden, inner, spec.mlp_bias),
        }
        for name, (rows, columns, bias) in projections.items():
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{layer}.{name}.bias"] = (rows,)
        if spec.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (spec.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (spec.head_dim,)
    return shapes


def check_weights(folder: Path, spec: ModelSpec) -> dict[str, TensorEntry]:
    """Find every needed tensor, with the right shape; reads headers only.

    Raises:
        ModelBroken: Naming the file, or the tensor that is missing or misshapen.
    """
    found = list_tensors(folder)
    for name, shape in expected_tensors(spec).items():
        entry = found.get(name)
        if entry is None:
            raise ModelBroken(f"{folder} has no tensor {name}", path=str(folder))
        if entry.shape != shape:
            raise ModelBroken(
                f"{entry.path}: {name} has shape {list(entry.shape)}; config.json wants "
                f"{list(shape)}",
                path=str(entry.path),
            )
    return found


class WeightFiles:
    """The weights of a folder, read part by part, so that no more than one part is held twice.

    Where asked for, rotated dimensions are re-ordered for :mod:`sessionkv.model.rope`: dimension i
    and its partner i + head_dim / 2 become neighbours, in queries and keys alike, which no dot
    product notices. Every tensor given out is new and independent of the files.
    """

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        neighbours: bool = True,
    ) -> None:
        """Check the folder and open nothing yet.

        Args:
            folder: Of the model.
            spec: What its ``config.json`` says.
            dtype: Of every tensor given out.
            device: Where they are.
            neighbours: Whether rotated partners are made neighbours.

        Raises:
            ModelBroken: Naming the file or tensor.
        """
        self._spec = spec
        self._dtype, self._device, self._neighbours = dtype, device, neighbours
        self._entries = check_weights(folder, spec)
        self._maps: dict[Path, mmap.mmap] = {}

    def embedding(self) -> Tensor:
        """``[vocab_size, hidden]``."""
        return self._load("model.embed_tokens.weight")

    def final_norm(self) -> Tensor:
        """``[hidden]``."""
        return self._load("model.norm.weight")

    def output(self) -> Tensor | None:
        """``[vocab_size, hidden]``, or None where it is the embedding."""
        return None if self._spec.tied_embeddings else self._load("lm_head.weight")

    def layer(self, index: int) -> LayerWeights:
        """All weights of one layer."""
        spec = self._spec
        layer = f"model.layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"

        def qkv(kind: str) -> Tensor:
            q, k, v = (self._load(f"{attention}.{name}_proj.{kind}") for name in "qkv")
            return torch.cat([self._ordered(q), self._ordered(k), v])

        def gate_up(kind: str) -> Tensor:
            return torch.cat([self._load(f"{mlp}.{name}_proj.{kind}") for name in ("gate", "up")])

        return LayerWeights(
            input_norm=self._load(f"{layer}.input_layernorm.weight"),
            qkv=qkv("weight"),
            qkv_bias=qkv("bias") if spec.qkv_bias else None,
            q_norm=self._ordered(self._load(f"{attention}.q_norm.weight"))
            if spec.qk_norm
            else None,
            k_norm=self._ordered(self._load(f"{attention}.k_norm.weight"))
            if spec.qk_norm
            else None,
            o=self._load(f"{attention}.o_proj.weight"),
            o_bias=self._load(f"{attention}.o_proj.bias") if spec.o_bias else None,
            post_norm=self._load(f"{layer}.post_attention_layernorm.weight"),
            gate_up=gate_up("weight"),
            gate_up_bias=gate_up("bias") if spec.mlp_bias else None,
            down=self._load(f"{mlp}.down_proj.weight"),
            down_bias=self._load(f"{mlp}.down_proj.bias") if spec.mlp_bias else None,
        )

    def _ordered(self, tensor: Tensor) -> Tensor:
        return _pair(tensor, self._spec) if self._neighbours else tensor

    def _load(self, name: str) -> Tensor:
        entry = self._entries[name]
        if entry.path not in self._maps:
            with entry.path.open("rb") as file:
                # Copy-on-write, as torch wants writable memory; nothing is written.
                self._maps[entry.path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        dtype = _DTYPES[entry.dtype]
        flat = torch.frombuffer(
            self._maps[entry.path],
            dtype=dtype,
            count=entry.nbytes // dtype.itemsize,
            offset=entry.offset,
        )
        return flat.reshape(entry.shape).to(self._device, self._dtype, copy=True)


def _pair(tensor: Tensor, spec: ModelSpec) -> Tensor:
    """Within each head, order rows 0, half, 1, half + 1, ...; ``[heads * head_dim, ...]``."""
    heads = tensor.reshape(-1, 2, spec.head_dim // 2, *tensor.shape[1:])
    return heads.transpose(1, 2).reshape(tensor.shape)
