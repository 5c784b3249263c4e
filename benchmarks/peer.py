"""transformers as the other side of a comparison: same model, fp32, its cache kept."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Options


def model_folder(options: Options) -> Path:
    """The prepared model, fetched and converted if that was not done yet."""
    from sessionkv.config import user_cache_dir
    from sessionkv.model.prepare import prepare_model

    return prepare_model(options.model, cache_dir=user_cache_dir()).folder


def random_tokens(count: int, seed: int) -> list[int]:
    """Ids that every vocabulary has and that no earlier call with another seed gave."""
    source = random.Random(seed)
    return [source.randrange(100, 10_000) for _ in range(count)]


class TransformersPeer:
    """Greedy decoding with one growing cache, as a careful user of transformers would do it."""

    def __init__(self, options: Options) -> None:
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(options.threads)
        self._torch = torch
        self._new_cache = DynamicCache
        self._model = AutoModelForCausalLM.from_pretrained(
            model_folder(options), dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._cache = self._new_cache(config=self._model.config)

    def rewind(self, length: int) -> None:
        """Cut the cache back to ``length`` tokens."""
        self._cache.crop(length - self._cache.get_seq_length())  # how many to remove, negative

    def feed(self, tokens: Sequence[int]) -> int:
        """Compute the tokens after what is cached; the likeliest next one."""
        with self._torch.inference_mode():
            output = self._model(
                input_ids=self._torch.tensor([list(tokens)]),
                cache=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
            return int(output.logits[0, -1].argmax())

    def first_token_s(self, tokens: Sequence[int]) -> float:
        """Seconds until the first token after these."""
        start = time.perf_counter()
        self.feed(tokens)
        return time.perf_counter() - start

    def decode_rate(self, token: int, count: int) -> float:
        """Tokens a second of ``count`` greedy steps from ``token``."""
        start = time.perf_counter()
        for _ in range(count):
            token = self.feed([token])
        return count / (time.perf_counter() - start)
