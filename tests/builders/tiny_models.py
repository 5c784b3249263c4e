"""Tiny random models of every family, saved as Hugging Face folders, and plans to run them with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from sessionkv.engine.model_runner import ModelRunner
from sessionkv.model.prepare import PreparedModel, prepare_model
from sessionkv.types import (
    SamplingParams,
    SequenceStart,
    SequenceStep,
    StepOutput,
    StepPlan,
)

VOCAB = 128
MAX_LEN = 256
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 16, "num_key_value_heads": 6}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama3-rope": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": _YARN}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "mistral-head-dim": ("Mistral", {"sliding_window": 7, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-biases": ("Qwen3", {"head_dim": 8, "attention_bias": True}),
}


def hugging_face_model(variant: str, *, seed: int = 7, **shape: object) -> torch.nn.Module:
    """A transformers model with every weight random, norms and biases included.

    ``shape`` overrides what the variants have in common.
    """
    import transformers

    family, changes = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(**{**_SHAPE, **changes, **shape})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    return model


def save_model(model: torch.nn.Module, folder: Path, *, shard: str | None = None) -> Path:
    """Save model and a word-level tokenizer, as a hub folder would be."""
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Words t0 ... t127; t1 is BOS, t2 is EOS, both special."""
    words = {f"t{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["t1", "t2"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "t1", "eos_token": {"content": "t2"}, "chat_template": "{{ 1 }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def prepare_tiny(variant: str, folder: Path, *, seed: int = 7, **shape: object) -> PreparedModel:
    """Save and prepare a variant below ``folder``; ``shape`` as in :func:`hugging_face_model`."""
    saved = save_model(hugging_face_model(variant, seed=seed, **shape), folder / "model")
    return prepare_model(str(saved), cache_dir=folder / "cache", offline=True)


def make_runner(
    prepared: PreparedModel,
    *,
    block_size: int = 4,
    num_blocks: int = 64,
    mirrors: bool = True,
    mirror_bytes: int | None = None,
) -> ModelRunner:
    """A runner; ``mirrors=False`` leaves no memory for them."""
    if mirror_bytes is None:
        mirror_bytes = 2**28 if mirrors else 0
    return ModelRunner(
        prepared,
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=prepared.spec.max_model_len,
        threads=None,
        mirror_bytes=mirror_bytes,
    )


class Driver:
    """Runs sequences on a runner as the scheduler would, one plan at a time."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.next_step = 0

    def run(
        self,
        *,
        starts: Iterable[SequenceStart] = (),
        steps: Iterable[SequenceStep] = (),
        **rest: object,
    ) -> StepOutput:
        self.next_step += 1
        plan = StepPlan(self.next_step, starts=tuple(starts), steps=tuple(steps), **rest)
        return self.runner.execute(plan)


def tokens(count: int, seed: int = 1) -> list[int]:
    """Random ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=generator).tolist()


def start(
    seq_id: int,
    token_ids: Sequence[int],
    block_ids: Sequence[int] = (),
    *,
    cached: int = 0,
    num_prompt: int | None = None,
    sampling: SamplingParams | None = None,
    stop_token_ids: frozenset[int] = frozenset({2}),
    prompt_logprobs: int | None = None,
) -> SequenceStart:
    """A start, greedy unless said otherwise."""
    return SequenceStart(
        seq_id=seq_id,
        block_ids=tuple(block_ids),
        num_cached_tokens=cached,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids) if num_prompt is None else num_prompt,
        sampling=sampling or SamplingParams(temperature=0.0),
        stop_token_ids=stop_token_ids,
        prompt_logprobs=prompt_logprobs,
    )


def step(
    seq_id: int,
    first: int,
    token_ids: Sequence[int],
    new_blocks: Sequence[int] = (),
    *,
    sample: bool = False,
) -> SequenceStep:
    """A step."""
    return SequenceStep(seq_id, first, list(token_ids), tuple(new_blocks), sample)
