"""The whole engine over the GPU's runner: wherever a history was meanwhile, replies are exact.

In fp32, so that ids can be compared with those of the CPU's engine, which has no cache here. Most
turns are drawn with a seed, which a wrong history shows in at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from sessionkv import Client, SamplingParams, launch
from sessionkv.client.results import TurnResult
from sessionkv.errors import TurnFailed
from sessionkv.types import StepPlan
from tests.builders.doors import Later
from tests.builders.engine import CheckedEngine, StepGate
from tests.builders.gpu_engine import cold_engine, gpu_config, gpu_engine, save_small_model
from tests.builders.tiny_models import tokens

gpu = pytest.mark.gpu


def drawn(count: int, seed: int = 3, **fields: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1.2, "seed": seed, "max_tokens": count, "ignore_eos": True} | fields
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="module")
def cold(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedEngine]:
    with cold_engine(model, tmp_path_factory.mktemp("cold")) as engine:
        yield engine


Opened = Callable[..., AbstractContextManager[CheckedEngine]]


@pytest.fixture
def opened(model: Path, device: torch.device, tmp_path: Path) -> Opened:
    """Opens engines, one at a time, on one store."""

    def opened(
        gate: Callable[[StepPlan], None] | None = None, **config: Any
    ) -> AbstractContextManager[CheckedEngine]:
        whole = gpu_config(model, tmp_path / "store", device=device.type, **config)
        return gpu_engine(whole, gate=gate)

    return opened


def assert_cold(
    cold: Client, prompt: Sequence[int], result: TurnResult, sampling: SamplingParams
) -> None:
    """The ids are those of a run without a cache."""
    expected = cold.generate(tokens=list(prompt), sampling=sampling, cache=False)
    assert list(result.tokens) == list(expected.tokens)


class Talk:
    """A raw session, checked at every turn."""

    def __init__(self, engine: Client, cold: Client, name: str, log: Sequence[int] = ()) -> None:
        self.session, self.cold, self.log = engine.open(name), cold, list(log)

    def turn(self, delta: list[int], count: int = 3, **fields: Any) -> tuple[int, int, int, int]:
        """Tokens found on device, on the host, on disk, and computed ones."""
        sampling = drawn(count, **fields)
        result = self.session.turn(tokens=delta, sampling=sampling)
        assert_cold(self.cold, [*self.log, *delta], result, sampling)
        self.log += [*delta, *result.tokens]
        report = result.cache
        return (
            report.device_tokens,
            report.host_tokens,
            report.disk_tokens,
            report.computed_tokens,
        )


def push_out(engine: Client, num_tokens: int) -> None:
    """Fill the device with something else."""
    engine.generate(tokens=tokens(num_tokens, 99), sampling=drawn(1))


# ---- interpreted too -------------------------------------------------------------------------


def test_on_the_device_forked_with_a_tail_that_is_shared_and_rewound(
    opened: Opened, cold: Client
) -> None:
    with opened(step_tokens=8) as engine:
        talk = Talk(engine, cold, "a")
        assert talk.turn(tokens(6, 1)) == (0, 0, 0, 6)
        engine.session("a").fork("b")
        log = list(talk.log)
        # Both go on in the middle of a block: what comes second has to copy it.
        assert talk.turn([7, 8], 2) == (8, 0, 0, 3)
        branch = Talk(engine, cold, "b", log)
        assert branch.turn([9, 10], 2) == (9, 0, 0, 2)
        engine.session("a").rewind()
        talk.log = log
        assert talk.turn([11], 1) == (9, 0, 0, 1)
        assert branch.turn([12], 1) == (12, 0, 0, 2)
        engine.assert_ledger()


def test_through_host_memory_disk_and_a_restart(opened: Opened, cold: Client) -> None:
    with opened(blocks=4, host_blocks=8, disk=True, step_tokens=8) as engine:
        talk = Talk(engine, cold, "a")
        talk.turn(tokens(7, 1), 2)
        push_out(engine, 15)
        assert talk.turn([8], 2) == (0, 8, 0, 2)
        engine.flush()
        engine.assert_ledger()
    with opened(blocks=4, host_blocks=0, disk=True, step_tokens=8) as engine:
        talk = Talk(engine, cold, "a", talk.log)
        assert talk.turn([9], 2) == (0, 0, 11, 2)
        engine.assert_ledger()


def test_preempted_with_penalties_and_seeds(opened: Opened, cold: Client) -> None:
    gate = StepGate()
    sampling = [
        drawn(9, seed, repetition_penalty=1.3, frequency_penalty=0.5, min_tokens=4, logprobs=1)
        for seed in (1, 2)
    ]
    prompts = [tokens(3, 1), tokens(3, 2)]
    with opened(gate, blocks=4, host_blocks=8, step_tokens=8) as engine:
        turns = []
        for i in range(2):
            turns.append(
                Later(lambda i=i: engine.generate(tokens=prompts[i], sampling=sampling[i]))
            )
            gate.reached()
        engine.await_messages(1)
        gate.open()
        for prompt, params, turn in zip(prompts, sampling, turns, strict=True):
            assert_cold(cold, prompt, turn.result(), params)
        assert engine.stats()["preemptions"] >= 1
        engine.assert_ledger()


# ---- on the device alone ---------------------------------------------------------------------


@pytest.fixture
def on_gpu(model: Path, tmp_path: Path) -> Opened:
    def opened(
        gate: Callable[[StepPlan], None] | None = None, **config: Any
    ) -> AbstractContextManager[CheckedEngine]:
        return gpu_engine(gpu_config(model, tmp_path / "store", device="cuda", **config), gate=gate)

    return opened


@gpu
def test_long_histories_in_every_tier(on_gpu: Opened, cold: Client) -> None:
    with on_gpu(blocks=40, host_blocks=100, disk=True) as engine:
        talk = Talk(engine, cold, "a")
        talk.turn(tokens(90, 1), 20)
        assert talk.turn(tokens(9, 2), 5) == (109, 0, 0, 10)
        push_out(engine, 159)
        assert talk.turn([8], 5) == (0, 123, 0, 2)
        engine.flush()
        engine.assert_ledger()
    with on_gpu(blocks=40, host_blocks=0, disk=True) as engine:
        talk = Talk(engine, cold, "a", talk.log)
        assert talk.turn([9], 5) == (0, 0, 129, 2)
        # Warm and cold in one engine too, which is all of one arithmetic.
        again = engine.generate(tokens=talk.log, sampling=drawn(9), cache=True)
        alone = engine.generate(tokens=talk.log, sampling=drawn(9), cache=False)
        assert again.cache.cached_tokens > 100
        assert alone.cache.cached_tokens == 0
        assert again.tokens == alone.tokens
        engine.assert_ledger()


@gpu
@pytest.mark.parametrize("step_tokens", [None, 16])
def test_eight_equal_prompts_compute_what_they_share_once(
    on_gpu: Opened, cold: Client, step_tokens: int | None
) -> None:
    gate, prompt = StepGate(), tokens(50, 1)
    with on_gpu(gate, blocks=200, step_tokens=step_tokens) as engine:
        turns = []
        for i in range(8):
            turns.append(Later(lambda i=i: engine.generate(tokens=prompt, sampling=drawn(12, i))))
            gate.reached()
            engine.await_messages(i)
        gate.open()
        results = [turn.result() for turn in turns]
        for i, result in enumerate(results):
            assert_cold(cold, prompt, result, drawn(12, i))
        computed = sorted(result.cache.computed_tokens for result in results)
        assert computed[-1] == 50
        assert set(computed[:-1]) <= {1, 2}
        engine.assert_ledger()


@gpu
def test_cancelled_in_the_middle(on_gpu: Opened, cold: Client) -> None:
    with on_gpu() as engine:
        talk = Talk(engine, cold, "a")
        talk.turn(tokens(9, 1))
        for keep in (False, True):
            stream = engine.session("a").stream(tokens=[7, 8], sampling=drawn(150))
            for number, _ in enumerate(stream):
                if number == 2:
                    break
            kept = stream.cancel(keep=keep)
            if kept is not None:
                assert keep
                count = len(kept.tokens)
                expected = cold.generate(tokens=[*talk.log, 7, 8], sampling=drawn(count))
                assert kept.tokens == expected.tokens
                talk.log += [7, 8, *kept.tokens]
            talk.turn([9])
        engine.assert_ledger()


@gpu
def test_a_bad_number_fails_its_own_turn_only(on_gpu: Opened, cold: Client) -> None:
    prompts = [tokens(9, 1), tokens(9, 2), tokens(9, 3)]
    held, engines, spoiled = StepGate(), [], []

    def gate(plan: StepPlan) -> None:
        held(plan)
        victim = {s.seq_id: s.block_ids for s in plan.starts if list(s.token_ids) == prompts[1]}
        spoiled.extend(victim.values())
        if not plan.starts and len(plan.steps) == 3 and spoiled:
            runner = engines[0].parts.runner
            runner.pool[spoiled.pop()[0]] = float("nan")

    with on_gpu(gate) as engine:
        engines.append(engine)
        turns = []
        for i in range(3):
            turns.append(Later(lambda i=i: engine.generate(tokens=prompts[i], sampling=drawn(20))))
            held.reached()
            engine.await_messages(i)
        held.open()
        with pytest.raises(TurnFailed, match="not a finite number"):
            turns[1].result()
        for i in (0, 2):
            assert_cold(cold, prompts[i], turns[i].result(), drawn(20))
        after = tokens(11, 4)
        result = engine.generate(tokens=after, sampling=drawn(5))
        assert_cold(cold, after, result, drawn(5))


@gpu
def test_killed_and_restarted(model: Path, tmp_path: Path, cold: Client) -> None:
    config = gpu_config(model, tmp_path / "store", device="cuda", host_blocks=64, disk=True)
    with launch(config=config) as process:
        talk = Talk(process.client(), cold, "a")
        talk.turn(tokens(30, 1), 7)
        process.client().flush()
        process.kill()
    with launch(config=config) as process:
        talk = Talk(process.client(), cold, "a", talk.log)
        # Every whole block and the tail were on disk; how many were loaded is up to the rates.
        assert sum(talk.turn([9], 7)[2:]) == 38


NATS = 2**-4
"""A decode sums in another order than a prefill. Logits are below 4 here, where bf16 has steps of
2**-6: four of them."""


@gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_warm_are_near_the_cold_ones(on_gpu: Opened, dtype: str) -> None:
    with on_gpu(blocks=40, host_blocks=100, dtype=dtype) as engine:
        session = engine.open("a")
        log = tokens(60, 1)
        first = session.turn(tokens=log, sampling=drawn(8))
        push_out(engine, 159)
        warm = session.turn(tokens=[8, 9], sampling=drawn(8, logprobs=0))
        assert warm.cache.host_tokens == 67
        log += [*first.tokens, 8, 9]
        for token_id, found in zip(warm.tokens, warm.logprobs, strict=True):
            # The same token is forced; log-probabilities are of the logits before that.
            forced = SamplingParams(
                temperature=0.0, max_tokens=1, logit_bias={token_id: 1e6}, logprobs=0
            )
            alone = engine.generate(tokens=log, sampling=forced, cache=False)
            assert alone.tokens == (token_id,)
            assert abs(alone.logprobs[0][0].logprob - found[0].logprob) <= NATS
            log.append(token_id)
        engine.assert_ledger()
