"""The default model itself: greedy parity with transformers, and what its GGUF file says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from sessionkv.config import user_cache_dir
from sessionkv.engine.model_runner import ModelRunner
from sessionkv.model.prepare import PreparedModel, prepare_model
from sessionkv.model.weights import WeightFiles
from tests.builders.tiny_models import Driver, start, step

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK = 16
PROMPTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nName three primary colours."
    "<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time there was a lighthouse keeper who",
    "def fibonacci(n):\n    ",
    "The five largest countries by area are, in order: 1. Russia, 2.",
)


@pytest.fixture(scope="module")
def prepared(smollm2: str) -> PreparedModel:
    return prepare_model(smollm2, cache_dir=user_cache_dir(), offline=True)


@pytest.fixture(scope="module")
def tokenizer(prepared: PreparedModel) -> Tokenizer:
    return Tokenizer.from_file(str(prepared.text_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def reference(prepared: PreparedModel) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(prepared.folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def runner(prepared: PreparedModel) -> Iterator[ModelRunner]:
    runner = ModelRunner(
        prepared,
        block_size=BLOCK,
        num_blocks=64,
        max_model_len=512,
        threads=None,
        mirror_bytes=2**28,
    )
    yield runner
    runner.close()


def likeliest(reference: Any, prompt: list[int], reply: list[int]) -> list[int]:
    """What transformers finds likeliest behind the prompt and behind each token of the reply.

    Where it equals the reply, that is what transformers decodes greedily, token by token.
    """
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + reply[:-1]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


def run_together(runner: ModelRunner, prompts: list[list[int]], count: int) -> list[list[int]]:
    """All prompts in one batch, blocks dealt out in turn, so that tables are interleaved."""
    driver, tables = (
        Driver(runner),
        [list(range(i, runner.num_blocks, len(prompts))) for i in range(len(prompts))],
    )
    held = [0] * len(prompts)

    def grow(i: int, num_tokens: int) -> list[int]:
        wanted = -(-num_tokens // BLOCK)
        new, held[i] = tables[i][held[i] : wanted], max(held[i], wanted)
        return new

    output = driver.run(
        starts=[start(i, prompt) for i, prompt in enumerate(prompts)],
        steps=[
            step(i, 0, prompt, grow(i, len(prompt)), sample=True)
            for i, prompt in enumerate(prompts)
        ],
    )
    found = [[output.sampled[i].token_id] for i in range(len(prompts))]
    for turn in range(count - 1):
        steps = []
        for i, prompt in enumerate(prompts):
            at = len(prompt) + turn
            steps.append(step(i, at, found[i][-1:], grow(i, at + 1), sample=True))
        output = driver.run(steps=steps)
        for i in range(len(prompts)):
            found[i].append(output.sampled[i].token_id)
    driver.run(ends=tuple(range(len(prompts))))
    return found


def test_greedy_ids_equal_transformers(
    runner: ModelRunner, reference: Any, tokenizer: Tokenizer
) -> None:
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    replies = run_together(runner, prompts, 64)
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply == likeliest(reference, prompt, reply)
        assert len(reply) == 64
    alone = [run_together(runner, [prompt], 24)[0] for prompt in prompts]  # another product
    assert alone == [reply[:24] for reply in replies]
    assert "Paris" in tokenizer.decode(replies[0])


def test_what_the_file_says_is_what_is_used(prepared: PreparedModel, tokenizer: Tokenizer) -> None:
    spec = prepared.spec
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.vocab_size, spec.max_model_len, spec.rope.theta) == (49152, 8192, 100000.0)
    info = json.loads((prepared.text_dir / "text.json").read_text())
    assert info["eos_token_ids"] == [2]
    assert (info["bos_token_id"], info["add_bos"], info["vocab_size"]) == (1, False, 49152)
    assert (info["bos_token"], info["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert spec.tied_embeddings
    assert WeightFiles(prepared.folder, spec).output() is None
    # The file's pre-tokenizer splits digits, which shows where spaces stand before a number.
    assert tokenizer.encode("a  12").ids == [
        *tokenizer.encode("a  ").ids,
        *tokenizer.encode("1").ids,
        *tokenizer.encode("2").ids,
    ]


def test_logits_are_not_uniform(runner: ModelRunner, tokenizer: Tokenizer) -> None:
    from sessionkv.types import SamplingParams

    prompt = tokenizer.encode(PROMPTS[0]).ids
    params = SamplingParams(temperature=0.0, logprobs=1)
    driver = Driver(runner)
    output = driver.run(
        starts=[start(1, prompt, sampling=params)],
        steps=[step(1, 0, prompt, range(2), sample=True)],
    )
    driver.run(ends=(1,))
    assert output.sampled[1].logprobs[0].logprob > -1.0
