"""Thirty random turns with the default model: log and KV are what it sampled."""

import random
from pathlib import Path
from typing import Any

import pytest

from sessionkv import CacheConfig, Engine, EngineConfig, SamplingParams
from sessionkv.engine.build import BuiltEngine, build_engine
from sessionkv.engine.runner import LaterResult, Runner
from sessionkv.types import StepOutput, StepPlan
from tests.builders import text as built
from tests.builders.drift import Conversation, Drifter

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

TURNS = 30
BLOCK_SIZE = 16
STOPS = [".", " the", ",", "I", "e", "\n", "never there", "\u3042"]
PROBE = SamplingParams(temperature=0.0, max_tokens=1)


class Recording:
    """A runner whose samples are kept: those of the sequence that started last."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.plan: object = None
        self.sampled: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> LaterResult:
        step = self._runner.launch(plan)
        return LaterResult(lambda: self._kept(plan, step.result()))

    def _kept(self, plan: StepPlan, output: StepOutput) -> StepOutput:
        if self.plan is not None:
            if plan.starts:
                self.sampled = []
            self.sampled += [token.token_id for token in output.sampled.values()]
        return output


class ModelDrifter(Drifter):
    """Takes what the model says; it cannot be told what to say."""

    def _reply(self) -> list[int]:
        return []

    def _sampling(self, reply: list[int]) -> SamplingParams:
        rng = self.rng
        return SamplingParams(
            temperature=rng.choice((0.0, 1.0, 1.5)),
            max_tokens=rng.randrange(2, 14),
            stop=tuple(rng.sample(STOPS, 2)) if rng.random() < 0.5 else (),
            ignore_eos=rng.random() < 0.2,
            logprobs=0 if rng.random() < 0.3 else None,
        )

    def _probe(self, conversation: Conversation) -> None:
        """Warm as cold: the likeliest next token is the same where the cache is not used."""
        if self.num_turns % 3:
            return  # a cold run computes the whole history
        warm, cold = (
            self.engine.generate(tokens=conversation.log, sampling=PROBE, cache=cache)
            for cache in (True, False)
        )
        assert warm.tokens == cold.tokens
        written = min(conversation.ends[-1][1], len(conversation.log) - 1)
        assert warm.cache.cached_tokens >= written // BLOCK_SIZE * BLOCK_SIZE
        assert cold.cache.cached_tokens == 0


class ModelEngine(Engine):
    """Keeps what it was built of."""

    def __init__(self, config: EngineConfig) -> None:
        self.recording: Recording
        self.parts: Any

        def build(config: EngineConfig, **arguments: Any) -> BuiltEngine:
            built = build_engine(config, wrap_runner=self._record, **arguments)
            self.parts = built.parts
            return built

        super().__init__(config, build=build)

    def _record(self, runner: Runner) -> Any:
        self.recording = Recording(runner)
        return self.recording


def test_thirty_random_turns(smollm2: str, tmp_path: Path) -> None:
    config = EngineConfig(
        model=smollm2,
        store=tmp_path,
        offline=True,
        max_model_len=2048,
        cache=CacheConfig(block_size=BLOCK_SIZE, device_blocks=512, host_bytes=0),
    )
    with ModelEngine(config) as engine:
        drifter = ModelDrifter(
            engine, built.smollm2(), engine.recording, random.Random("drift model"),
            oracle=lambda ids: [], systems=[None, "Be brief.", "Say <|im_end|>é."],
            block_size=BLOCK_SIZE,
        )  # fmt: skip
        while drifter.num_turns < TURNS:
            drifter.step()
        engine.flush()
        engine.parts.kv.check()
        assert engine.parts.kv.ledger().idle
        assert len(drifter.ends) >= 4, drifter.ends
