"""What a model is made of, read from its ``config.json`` before anything is allocated.

One frozen value covers the Llama, Mistral, Qwen2 and Qwen3 families (SmolLM is a Llama). Whatever
the decoder cannot compute exactly is refused here, by name. Reads plain maps; must not know of
tensors, files of weights or tokenizers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sessionkv.errors import ModelBroken, ModelUnsupported
from sessionkv.types import KVGeometry

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_RECURRENT = ("mamba", "rwkv", "jamba", "recurrent", "bamba", "falcon_h1", "zamba", "lfm", "xlstm")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding with fixed frequencies, independent of the length of a sequence.

    Attributes:
        kind: One of :data:`ROPE_KINDS`.
        theta: Base of the wavelengths.
        factor: By how much ``linear``, ``llama3`` and ``yarn`` stretch positions.
        original_max_len: Positions the model was first trained with (``llama3``, ``yarn``).
        low_freq_factor: ``llama3``: wavelengths above original_max_len / this are stretched fully.
        high_freq_factor: ``llama3``: wavelengths below original_max_len / this are left alone.
        beta_fast: ``yarn``: rotations above which a dimension is left alone.
        beta_slow: ``yarn``: rotations below which it is stretched fully.
        truncate: ``yarn``: round the ends of the ramp to whole dimensions.
        attention_factor: Multiplies cosine and sine; 1 except for ``yarn``.
    """

    kind: str
    theta: float
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything the decoder has to know of a model besides its weights.

    Attributes:
        family: One of :data:`FAMILIES`.
        tied_embeddings: The output projection is the embedding matrix.
        qk_norm: Queries and keys are RMS-normalised per head before the rotary embedding.
        qkv_bias: The query, key and value projections have a bias.
        o_bias: The attention's output projection has one.
        mlp_bias: The three projections of the MLP have one.
        windows: For each layer, how many positions a query sees at most, itself included; None
            is all.
        max_model_len: Positions the model is made for.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    rms_eps: float
    tied_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    rope: RopeSpec

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (and of all value heads)."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Elements of the large matrices, a tied embedding counted once."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        embeddings = 1 if self.tied_embeddings else 2
        return self.num_layers * layer + embeddings * self.vocab_size * self.hidden_size

    def cpu_weights_bytes(self, *, blas: bool) -> int:
        """Memory of the weights as the CPU decoder holds them, known before they are loaded.

        fp32; the output projection is a copy of its own, in its own layout, also where it is tied.

        Args:
            blas: Which way products go; all matrices but the embedding are held twice for it.
        """
        embedding = self.vocab_size * self.hidden_size
        matrices = self.num_parameters - (0 if self.tied_embeddings else embedding)
        return 4 * (embedding + matrices * (2 if blas else 1) + self._num_biases)

    @property
    def _num_biases(self) -> int:
        layer = (self.q_size + 2 * self.kv_size) * self.qkv_bias + self.hidden_size * self.o_bias
        layer += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        return self.num_layers * layer

    def kv_geometry(self, block_size: int, dtype: str = "float32") -> KVGeometry:
        """Shape of a block's KV; ``dtype`` is one of :data:`ELEMENT_BYTES`."""
        return KVGeometry(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
            element_bytes=ELEMENT_BYTES[dtype],
        )


def load_spec(folder: Path) -> ModelSpec:
    """Read ``config.json`` of a model folder.

    Raises:
        ModelBroken: It is missing, not JSON, or lacks or contradicts a value.
        ModelUnsupported: The decoder cannot compute this model.
    """
    path = folder / "config.json"
    return spec_from_config(read_json(path), str(path))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ModelBroken: Naming the file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelBroken(f"{path} is missing", path=str(path)) from None
    except (OSError, ValueError) as error:
        raise ModelBroken(f"{path} cannot be read: {error}", path=str(path)) from None
    if not isinstance(value, dict):
        raise ModelBroken(f"{path} holds no JSON object", path=str(path))
    return value


def spec_from_config(config: Mapping[str, Any], source: str = "config") -> ModelSpec:
    """Build the spec from a Hugging Face configuration map, of old or new form.

    Args:
        config: As in ``config.json``.
        source: Where it came from, for errors.

    Raises:
        ModelBroken: A value is missing, of the wrong kind or contradicts another.
        ModelUnsupported: The architecture or a setting is not supported.
    """
    family = _family(config, source)
    read = _Reader(config, source)
    num_heads = read.count("num_attention_heads")
    hidden_size = read.count("hidden_size")
    num_kv_heads = read.count("num_key_value_heads", 8 if family == "mistral" else num_heads)
    head_dim = read.count("head_dim", 128 if family == "qwen3" else hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelBroken(
            f"{source}: {num_heads} heads over {num_kv_heads} key heads of {head_dim} dimensions",
            path=source,
        )
    attention_bias = family in ("llama", "qwen3") and bool(config.get("attention_bias"))
    num_layers = read.count("num_hidden_layers")
    max_model_len = read.count("max_position_embeddings")
    return ModelSpec(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=read.count("intermediate_size"),
        vocab_size=read.count("vocab_size"),
        max_model_len=max_model_len,
        rms_eps=read.number("rms_norm_eps", 1e-6),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qk_norm=family == "qwen3",
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias")),
        windows=_windows(config, family, num_layers, read),
        rope=_rope(config, max_model_len, source),
    )


def _family(config: Mapping[str, Any], source: str) -> str:
    """The supported family of this configuration; everything else is refused by its name."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelBroken(f"{source} has no model_type", path=source)
    supported = f"supported: {', '.join(FAMILIES)}"
    if any(word in model_type for word in _RECURRENT):
        raise ModelUnsupported(
            f"{model_type} keeps a recurrent state, which no KV cache can hold; {supported}",
            architecture=model_type,
        )
    if model_type not in FAMILIES:
        raise ModelUnsupported(
            f"architecture {model_type} is not supported; {supported}", architecture=model_type
        )
    for name in config.get("architectures") or ():
        if not str(name).endswith("ForCausalLM"):
            raise ModelUnsupported(
                f"{name} is not a language model with an output projection", architecture=str(name)
            )
    if config.get("quantization_config"):
        raise ModelUnsupported(f"{source}: quantised weights are not supported in this format")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelUnsupported(f"hidden_act {activation} is not supported; supported: silu")
    return model_type


def _windows(
    config: Mapping[str, Any], family: str, num_layers: int, read: _Reader
) -> tuple[int | None, ...]:
    """Sliding window of each layer, by the family's own rule."""
    everywhere: tuple[int | None, ...] = (None,) * num_layers
    if family == "llama" or config.get("sliding_window") is None:
        return everywhere
    if family != "mistral" and not config.get("use_sliding_window", False):
        return everywhere
    window = read.count("sliding_window")
    if family == "mistral":
        return (window,) * num_layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = read.count("max_window_layers", 28, least=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelUnsupported(f"layer type {sorted(map(str, unknown))[0]} is not supported")
    if len(kinds) != num_layers:
        raise ModelBroken(f"{read.source}: {len(kinds)} layer_types for {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(config: Mapping[str, Any], max_model_len: int, source: str) -> RopeSpec:
    """Rotary settings, from ``rope_parameters`` or older ``rope_theta`` and ``rope_scaling``."""
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(values, Mapping):
        raise ModelBroken(f"{source}: rope settings are no map", path=source)
    if any(isinstance(value, Mapping) for value in values.values()):
        raise ModelUnsupported("rope settings that differ between layer types are not supported")
    kind = str(values.get("rope_type", values.get("type", "default")))
    if kind not in ROPE_KINDS:
        raise ModelUnsupported(
            f"rope type {kind} is not supported; supported: {', '.join(ROPE_KINDS)}", rope=kind
        )
    partial = values.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelUnsupported(f"partial_rotary_factor {partial} is not supported")
    read = _Reader(values, f"{source}: rope")
    theta = values.get("rope_theta") or config.get("rope_theta") or 10000.0
    if kind == "default":
        return RopeSpec(kind, float(theta))
    if kind == "linear":
        return RopeSpec(kind, float(theta), read.number("factor"))
    original = config.get("original_max_position_embeddings") or read.count(
        "original_max_position_embeddings", max_model_len
    )
    if kind == "llama3":
        return RopeSpec(
            kind,
            float(theta),
            read.number("factor"),
            int(original),
            low_freq_factor=read.number("low_freq_factor"),
            high_freq_factor=read.number("high_freq_factor"),
        )
    factor = read.number("factor", max_model_len / int(original))
    return RopeSpec(
        kind,
        float(theta),
        factor,
        int(original),
        beta_fast=read.number("beta_fast", 32.0),
        beta_slow=read.number("beta_slow", 1.0),
        truncate=bool(values.get("truncate", True)),
        attention_factor=_yarn_attention_factor(values, factor),
    )


def _yarn_attention_factor(values: Mapping[str, Any], factor: float) -> float:
    """Scale of cosine and sine (YaRN, arXiv:2309.00071, section 3.4), unless it is given."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])
    mscale, mscale_all_dim = values.get("mscale"), values.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


class _Reader:
    """Typed look-ups in a map, with errors that name file, key and value."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ModelBroken(
                f"{self.source}: {key} is {value!r}, not a whole number from {least}",
                path=self.source,
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ModelBroken(
                f"{self.source}: {key} is {value!r}, not a positive number", path=self.source
            )
        return float(value)
