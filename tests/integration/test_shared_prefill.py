"""Prompts that begin alike and come together compute what they share once."""

from collections.abc import Sequence

import pytest

from sessionkv import Client
from sessionkv.client.results import TurnResult
from sessionkv.errors import TurnError
from sessionkv.types import StepPlan
from tests.builders.checksum import tokens
from tests.builders.doors import Later
from tests.builders.engine import (
    CheckedEngine,
    StepGate,
    engine_config,
    greedy,
    open_engine,
    oracle,
)

PROMPT = tokens(50)
ASK = greedy(3)
EIGHT = range(8)


def start_eight(engine: CheckedEngine, gate: StepGate, prompts: list[list[int]]) -> list[Later]:
    """The first is at the gate in its first step when the others come."""
    for i in EIGHT:
        engine.open(f"s{i}")
    turns = []
    for i in EIGHT:
        turns.append(Later(lambda i=i: turn(engine, i, prompts[i])))
        gate.reached()
        engine.await_messages(i)
    return turns


def turn(client: Client, i: int, prompt: list[int]) -> TurnResult:
    return client.session(f"s{i}").turn(tokens=prompt, sampling=ASK)


@pytest.mark.parametrize("step_tokens", [8, 16, 64, 256])
def test_eight_equal_prompts(step_tokens: int) -> None:
    gate = StepGate()
    with open_engine(engine_config(blocks=200, step_tokens=step_tokens), gate=gate) as engine:
        turns = start_eight(engine, gate, [PROMPT] * 8)
        gate.open()
        results = [later.result() for later in turns]
        assert all(list(result.tokens) == oracle(PROMPT, ASK) for result in results)
        # Whole blocks are shared; the tail after the last of them is each one's own, unless
        # somebody has left it already.
        first, *others = [result.cache.computed_tokens for result in results]
        assert first == 50
        assert set(others) <= {1, 2}
        engine.assert_ledger()


def test_eight_prompts_that_part_at_different_places() -> None:
    gate = StepGate()
    prompts = [[*PROMPT[: 6 * i], *tokens(50 - 6 * i, start=1000 + 7 * i)] for i in EIGHT]
    with open_engine(engine_config(blocks=200, step_tokens=16), gate=gate) as engine:
        turns = start_eight(engine, gate, prompts)
        gate.open()
        for prompt, later in zip(prompts, turns, strict=True):
            assert list(later.result().tokens) == oracle(prompt, ASK)
        engine.assert_ledger()


class FirstFails:
    """In one step the result of the sequence that came first is unusable."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._now = 0
        self._first: int | None = None

    def watch(self, plan: StepPlan) -> None:
        self._now = plan.step_id
        if self._first is None:
            self._first = plan.steps[0].seq_id

    def __call__(self, seq_id: int, token_ids: Sequence[int]) -> bool:
        return seq_id == self._first and self._now == self._step


@pytest.mark.parametrize("step", [1, 2, 3, 4])
@pytest.mark.parametrize("how", ["cancelled", "deleted", "failed"])
def test_the_others_go_on_when_the_one_that_computes_ends(step: int, how: str) -> None:
    """The one that fills the shared blocks ends after, or in, each of its chunks."""
    begin = StepGate()
    ending = StepGate(lambda plan: plan.step_id == step)
    fails = FirstFails(step if how == "failed" else 0)

    def gate(plan: StepPlan) -> None:
        fails.watch(plan)
        begin(plan)
        ending(plan)

    config = engine_config(blocks=200, step_tokens=16)
    with open_engine(config, gate=gate, runner={"fail_sequence": fails}) as engine:
        turns = start_eight(engine, begin, [PROMPT] * 8)
        if how == "failed":
            ending.open()
        begin.open()
        if how != "failed":
            ending.reached()
            before = messages(engine)
            ended = Later(lambda: end_first(engine, how))
            engine.await_messages(before + 1)
            ending.open()
            ended.result()
        assert isinstance(turns[0].error(), TurnError)
        results = [later.result() for later in turns[1:]]
        assert all(list(result.tokens) == oracle(PROMPT, ASK) for result in results)
        # What the first had computed by then counts, and nothing is computed twice.
        done = min(16 * (step - (how == "failed")), 48)
        computed = sum(result.cache.computed_tokens for result in results)
        assert computed == 50 - done + 6 * 2
        engine.assert_ledger()


def messages(engine: CheckedEngine) -> int:
    return len(engine.building.built.inbox._items)


def end_first(engine: CheckedEngine, how: str) -> None:
    if how == "deleted":
        engine.delete("s0")
    else:
        engine.session("s0").close()
