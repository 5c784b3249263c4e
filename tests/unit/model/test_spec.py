from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sessionkv.errors import ModelBroken, ModelUnsupported
from sessionkv.model.spec import RopeSpec, load_spec, spec_from_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def with_(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}


def test_llama() -> None:
    spec = spec_from_config(LLAMA)
    assert (spec.head_dim, spec.q_size, spec.kv_size) == (8, 64, 16)
    assert (spec.tied_embeddings, spec.qk_norm, spec.qkv_bias, spec.o_bias) == (False,) * 4
    assert spec.windows == (None,) * 4
    assert spec.rope == RopeSpec("default", 10000.0)
    assert spec.kv_geometry(16).block_bytes == 4 * 2 * 2 * 8 * 4 * 16


def test_key_heads_default_to_heads() -> None:
    assert spec_from_config(with_(num_key_value_heads=None)).num_kv_heads == 8
    assert spec_from_config(with_(num_key_value_heads=...)).num_kv_heads == 8


@pytest.mark.parametrize(
    ("changes", "qkv", "o", "mlp", "qk_norm"),
    [
        ({"attention_bias": True, "mlp_bias": True}, True, True, True, False),
        ({"model_type": "mistral", "attention_bias": True}, False, False, False, False),
        ({"model_type": "qwen2"}, True, False, False, False),
        ({"model_type": "qwen3", "head_dim": 8}, False, False, False, True),
        ({"model_type": "qwen3", "attention_bias": True}, True, True, False, True),
    ],
)
def test_biases_and_norms(
    changes: dict[str, Any], qkv: bool, o: bool, mlp: bool, qk_norm: bool
) -> None:
    spec = spec_from_config(with_(architectures=..., **changes))
    found = (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm)
    assert found == (qkv, o, mlp, qk_norm)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 9}, (9, 9, 9, 9)),
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 4),
        ({"model_type": "mistral"}, (None,) * 4),
        ({"model_type": "qwen2", "sliding_window": 9}, (None,) * 4),
        (
            {"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True,
             "max_window_layers": 3},
            (None, None, None, 9),
        ),
        (
            {"model_type": "qwen3", "sliding_window": 9, "use_sliding_window": True,
             "layer_types": ["sliding_attention", "full_attention"] * 2},
            (9, None, 9, None),
        ),
        ({"sliding_window": 9}, (None,) * 4),
    ],
)  # fmt: skip
def test_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert spec_from_config(with_(architectures=..., **changes)).windows == windows


def test_rope_of_old_and_new_form_is_the_same() -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    new = spec_from_config(with_(rope_parameters={**linear, "rope_theta": 5e5}))
    old = spec_from_config(with_(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}))
    assert new.rope == old.rope == RopeSpec("linear", 5e5, 2.0)


def test_yarn_attention_factor() -> None:
    def factor(**changes: Any) -> float:
        return spec_from_config(with_(rope_scaling={**YARN, **changes})).rope.attention_factor

    assert factor() == pytest.approx(0.1 * 1.3862943611 + 1)
    assert factor(attention_factor=1.5) == 1.5
    assert factor(mscale=1.0, mscale_all_dim=1.0) == 1.0


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "ntk"])
def test_rope_that_depends_on_length_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ModelUnsupported, match=f"rope type {kind} is not supported"):
        spec_from_config(with_(rope_scaling={"rope_type": kind, "factor": 2.0}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "architecture gpt2 is not supported"),
        ({"model_type": "mamba2"}, "mamba2 keeps a recurrent state"),
        ({"model_type": "recurrent_gemma"}, "recurrent_gemma keeps a recurrent state"),
        ({"model_type": "smollm3"}, "architecture smollm3"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer types"),
    ],
)
def test_what_cannot_be_computed_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelUnsupported, match=words):
        spec_from_config(with_(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": ...}, "hidden_size is None"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "8 heads over 3"),
        ({"head_dim": 7}, "7 dimensions"),
        ({"model_type": ...}, "no model_type"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope: factor is None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ],
)
def test_what_is_missing_or_wrong_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelBroken, match=words):
        spec_from_config(with_(**changes), "here/config.json")


@pytest.mark.parametrize("content", [None, "", "{", "[1]", '{"model_type": "llama"'])
def test_a_broken_file_is_named(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelBroken, match=str(tmp_path / "config.json")):
        load_spec(tmp_path)


def test_a_good_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_spec(tmp_path) == spec_from_config(LLAMA)
