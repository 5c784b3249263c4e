"""A preempted request continues its random numbers and penalties exactly.

The cases run on a real (tiny) model: uninterrupted; preempted after five tokens and resumed from
its tokens with nothing, some or most of its KV left; and among batch mates.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sessionkv.engine.model_runner import ModelRunner
from sessionkv.types import SamplingParams
from tests.builders.doors import Later
from tests.builders.engine import StepGate
from tests.builders.tiny_engine import tiny_engine
from tests.builders.tiny_models import Driver, make_runner, prepare_tiny, start, step

B = 4
PROMPT = [7] * 9
COUNT = 20
BLOCKS = list(range(8))


def continue_(
    driver: Driver, ids: list[int], params: SamplingParams, *, cached: int, until: int
) -> list[int]:
    """Start (or resume) with all of ``ids`` and sample until there are ``until`` tokens."""
    held = -(-len(ids) // B)
    begin = start(
        1, ids, BLOCKS[: cached // B], cached=cached, num_prompt=len(PROMPT), sampling=params
    )
    first = step(1, cached, ids[cached:], BLOCKS[cached // B : held], sample=True)
    output = driver.run(starts=[begin], steps=[first])
    ids = [*ids, output.sampled[1].token_id]
    while len(ids) < until:
        wanted = -(-len(ids) // B)
        new, held = BLOCKS[held:wanted], max(held, wanted)
        output = driver.run(steps=[step(1, len(ids) - 1, ids[-1:], new, sample=True)])
        ids.append(output.sampled[1].token_id)
    return ids


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return make_runner(prepare_tiny("llama", tmp_path_factory.mktemp("tiny")), block_size=B)


@pytest.mark.parametrize("cached", [0, 4, 12])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=11),
        SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=1.0),
        SamplingParams(temperature=1.0, seed=3, top_p=0.9, presence_penalty=1.0, min_tokens=9),
    ],
    ids=["seeded", "penalties", "all"],
)
def test_resuming_changes_nothing(params: SamplingParams, cached: int, runner: ModelRunner) -> None:
    driver, end = Driver(runner), len(PROMPT) + COUNT
    whole = continue_(driver, PROMPT, params, cached=0, until=end)
    driver.run(ends=(1,))
    part = continue_(driver, PROMPT, params, cached=0, until=len(PROMPT) + 5)
    driver.run(ends=(1,))
    assert part == whole[: len(part)]
    assert continue_(driver, part, params, cached=cached, until=end) == whole
    driver.run(ends=(1,))


def test_batch_mates_do_not_perturb_the_numbers(runner: ModelRunner) -> None:
    params = SamplingParams(temperature=1.0, seed=11)
    driver, end = Driver(runner), len(PROMPT) + COUNT
    whole = continue_(driver, PROMPT, params, cached=0, until=end)
    driver.run(ends=(1,))
    mate = SamplingParams(temperature=1.0, seed=11)
    ids, held = list(PROMPT), 0
    driver.run(
        starts=[start(2, PROMPT[:5], sampling=mate)], steps=[step(2, 0, PROMPT[:5], range(20, 22))]
    )
    at, last = 5, 9
    starts = [start(1, PROMPT, sampling=params)]
    computed = 0
    while len(ids) < end:
        wanted = -(-len(ids) // B)
        new, held = BLOCKS[held:wanted], max(held, wanted)
        output = driver.run(
            starts=starts,
            steps=[
                step(2, at, [last], [20 + at // B] if at % B == 0 else [], sample=True),
                step(1, computed, ids[computed:], new, sample=True),
            ],
        )
        starts, computed = [], len(ids)
        last, at = output.sampled[2].token_id, at + 1
        ids.append(output.sampled[1].token_id)
    driver.run(ends=(1, 2))
    assert ids == whole


@pytest.mark.parametrize("host_blocks", [0, 30], ids=["recomputed", "fetched"])
def test_penalties_of_a_whole_engine_cold_warm_and_preempted(
    host_blocks: int, tmp_path: Path
) -> None:
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.5, frequency_penalty=1.0, max_tokens=COUNT,
        ignore_eos=True, logprobs=2,
    )  # fmt: skip
    gate = StepGate()
    gate.open()
    with tiny_engine(
        tmp_path, blocks=10, host_blocks=host_blocks, gate=lambda plan: gate(plan)
    ) as engine:
        cold = engine.generate(tokens=PROMPT, sampling=params, cache=False)
        other = engine.generate(tokens=[9] * 9, sampling=params, cache=False)
        engine.generate(tokens=PROMPT, sampling=SamplingParams(temperature=0.0, max_tokens=1))
        warm = engine.generate(tokens=PROMPT, sampling=params)
        assert warm.cache.device_tokens == len(PROMPT) - 1
        gate = StepGate()
        mate = Later(lambda: engine.generate(tokens=[9] * 9, sampling=params))
        gate.reached()
        victim = Later(lambda: engine.generate(tokens=PROMPT, sampling=params))
        engine.await_messages(1)
        gate.open()
        results = [(warm, cold), (victim.result(), cold), (mate.result(), other)]
        assert engine.stats()["preemptions"] >= 1
        for result, right in results:
            assert result.tokens == right.tokens
            for ours, theirs in zip(result.logprobs, right.logprobs, strict=True):
                assert [item.token_id for item in ours] == [item.token_id for item in theirs]
                for mine, other in zip(ours, theirs, strict=True):
                    assert abs(mine.logprob - other.logprob) <= 1e-4
        engine.assert_ledger()
