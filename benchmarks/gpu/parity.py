"""Our log-probabilities against transformers' over the same weights.

A 16-bit engine cannot agree with another 16-bit one to the last bit. How far transformers itself is
from its own result in 32 bits is the measure: ours is not to be further away than twice that.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import GREEDY
from benchmarks.gpu.engine import running
from benchmarks.gpu.setting import Setting, in_child
from benchmarks.report import Row
from sessionkv.config import CacheConfig

Pair = tuple[list[int], list[int]]
"""A prompt, and the reply that follows it."""
Scores = list[list[tuple[float, float]]]
"""For each reply and token: its log-probability, and that of the likeliest token there."""


def parity(setting: Setting) -> list[Row]:
    """Greedy replies of ours, forced through transformers in 16 and in 32 bits."""
    pairs, ours = _ours(setting)
    folder = setting.model_folder(setting.small)
    lower, exact = in_child(transformers_scores, folder, pairs, setting.device)
    flat = [value for reply in ours for value in reply]
    near = _apart(flat, lower)
    own = _apart([score for reply in lower for score, _ in reply], exact)
    far = _apart(flat, exact)
    likeliest = [score == best for reply in exact for score, best in reply]
    bound = ("<=", 2.0 * max(own) + 0.01)
    return [
        *_rows("ours to transformers in bf16", near),
        *_rows("transformers in bf16 to fp32", own),
        *_rows("ours to transformers in fp32", far, bound),
        Row("chosen by us, likeliest in fp32", statistics.mean(likeliest), "x", len(likeliest)),
    ]


def _ours(setting: Setting) -> tuple[list[Pair], list[list[float]]]:
    """Replies of our engine to cold prompts, and the log-probability of each of their tokens."""
    scale = setting.scale
    pairs: list[Pair] = []
    logprobs: list[list[float]] = []
    blocks = 2 * (max(scale.parity) + scale.probed) // CacheConfig().block_size + 4
    with running(setting, setting.small, device_blocks=blocks, host_bytes=0, disk_bytes=0) as bench:
        for length in scale.parity:
            prompt = bench.tokens(length, "parity", length)
            trace = bench.ask(prompt, scale.probed, sampling=GREEDY | {"logprobs": 0})
            pairs.append((prompt, list(trace.tokens)))
            logprobs.append([entries[0].logprob for entries in trace.logprobs])
    return pairs, logprobs


def transformers_scores(folder: Path, pairs: Sequence[Pair], device: str) -> list[Scores]:
    """Each reply in one pass after its prompt, in 16 and in 32 bits."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    is_cuda = device != "cpu" and torch.cuda.is_available()
    found: list[Scores] = []
    for dtype in (torch.bfloat16, torch.float32):
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa"
        )
        model.to(torch.device("cuda" if is_cuda else "cpu")).eval()
        with torch.inference_mode():
            found.append([_scores(model, *pair) for pair in pairs])
    return found


def _scores(model: Any, prompt: list[int], reply: list[int]) -> list[tuple[float, float]]:
    import torch

    ids = torch.tensor([prompt + reply[:-1]], device=model.device)
    logits = model(input_ids=ids, logits_to_keep=len(reply)).logits[0]
    scores = logits.float().log_softmax(-1)
    chosen = scores.gather(1, torch.tensor(reply, device=model.device)[:, None])[:, 0]
    return list(zip(chosen.tolist(), scores.max(-1).values.tolist(), strict=True))


def _apart(values: Sequence[float], scores: Scores) -> list[float]:
    theirs = [score for reply in scores for score, _ in reply]
    return [abs(a - b) for a, b in zip(values, theirs, strict=True)]


def _rows(name: str, apart: Sequence[float], bound: tuple[str, float] | None = None) -> list[Row]:
    return [
        Row(
            f"log-probabilities, {name}: largest difference", max(apart), "nats", len(apart), bound
        ),
        Row(f"log-probabilities, {name}: mean", statistics.mean(apart), "nats", len(apart)),
    ]
