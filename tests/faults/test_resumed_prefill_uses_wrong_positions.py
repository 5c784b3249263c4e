"""A prefix that was reused must give the logits of a cold run, wherever it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from sessionkv.types import BlockCopy, SamplingParams
from tests.builders.tiny_engine import tiny_engine
from tests.builders.tiny_models import Driver, make_runner, prepare_tiny, start, step

B = 4
PROMPT = [(7 * i + 3) % 90 + 5 for i in range(40)]
PARAMS = SamplingParams(temperature=0.0, logprobs=20)


@pytest.mark.parametrize("mirrors", [True, False], ids=["mirrors", "blocks"])
@pytest.mark.parametrize("variant", ["llama", "mistral-window", "llama3-rope"])
def test_warm_equals_cold_for_every_length_of_the_prefix(
    variant: str, mirrors: bool, tmp_path: Path
) -> None:
    runner = make_runner(prepare_tiny(variant, tmp_path), block_size=B, mirrors=mirrors)
    driver = Driver(runner)
    cold = driver.run(
        starts=[start(0, PROMPT, sampling=PARAMS)],
        steps=[step(0, 0, PROMPT, range(10), sample=True)],
    ).sampled[0]
    for k in range(1, 40):
        table, copies = list(range(-(-k // B))), ()
        if k % B:  # the tail is copied on write, its later slots are another conversation's
            copies = (BlockCopy(src=table[-1], dst=20, num_tokens=k % B),)
            table[-1] = 20
        new = range(30, 30 + 10 - len(table))
        warm = driver.run(
            starts=[start(k, PROMPT, table, cached=k, sampling=PARAMS)],
            steps=[step(k, k, PROMPT[k:], new, sample=True)],
            copies=copies,
            ends=(k - 1,),
        ).sampled[k]
        assert warm.token_id == cold.token_id
        assert [item.token_id for item in warm.logprobs] == [
            item.token_id for item in cold.logprobs
        ]
        for ours, theirs in zip(warm.logprobs, cold.logprobs, strict=True):
            assert abs(ours.logprob - theirs.logprob) <= 1e-4


def test_in_a_whole_engine_for_every_length_of_the_prefix(tmp_path: Path) -> None:
    ask = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    with tiny_engine(tmp_path, blocks=512) as engine:
        for k in range(1, 40):
            prompt = [k + 88, *PROMPT[1:]]  # each k is another conversation from its first token on
            engine.generate(tokens=prompt[:k], sampling=ask)
            warm = engine.generate(tokens=prompt, sampling=ask)
            cold = engine.generate(tokens=prompt, sampling=ask, cache=False)
            assert (warm.cache.device_tokens, cold.cache.device_tokens) == (k, 0)
            assert warm.tokens == cold.tokens
            for ours, theirs in zip(warm.logprobs[0], cold.logprobs[0], strict=True):
                assert ours.token_id == theirs.token_id
                assert abs(ours.logprob - theirs.logprob) <= 1e-4
        engine.assert_ledger()
