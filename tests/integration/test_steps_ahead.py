"""Whole engines that launch the next step before the last one is collected."""

import pytest

from benchmarks.keeping import KeepingFront
from sessionkv.engine import core
from sessionkv.engine.checksum_runner import ChecksumRunner
from sessionkv.engine.messages import OpenSession, StopAt, SubmitTurn
from sessionkv.engine.rates import MeasuredRates
from sessionkv.engine.runner import LaterResult
from sessionkv.text.builtin import IM_END
from sessionkv.types import FinishReason, StepPlan
from tests.builders.checksum import tokens
from tests.builders.engine import Building, engine_config, greedy, open_engine, oracle

AHEAD = {"plans_ahead": True}


def test_steps_are_planned_ahead_and_counted_once() -> None:
    plans: list[StepPlan] = []
    with open_engine(engine_config(), gate=plans.append, runner=AHEAD) as engine:
        result = engine.open("a").turn(tokens=tokens(9), sampling=greedy(8))
        assert list(result.tokens) == oracle(tokens(9), greedy(8))
        assert [plan.is_ahead for plan in plans] == [False, *[True] * 7]
        stats = engine.stats()
        assert stats["steps"] == 8
        assert stats["generation_tokens"] == 8
        engine.assert_ledger()


def test_what_follows_an_end_token_is_computed_for_nothing_and_leaves_nothing() -> None:
    plans: list[StepPlan] = []

    def script(known: list[int]) -> int | None:
        return IM_END if len(known) == 11 else None

    prompt = tokens(9)
    ended = greedy(8, ignore_eos=False)
    with open_engine(
        engine_config(), gate=plans.append, runner=AHEAD | {"script": script}
    ) as engine:
        session = engine.open("a")
        result = session.turn(tokens=prompt, sampling=ended)
        assert result.finish_reason is FinishReason.STOP
        assert list(result.tokens) == [*oracle(prompt, greedy(2)), IM_END]
        # The fourth step, whose token nobody wanted.
        assert [len(plan.steps) for plan in plans] == [1, 1, 1, 1]
        assert engine.stats()["generation_tokens"] == 3
        follow = session.turn(tokens=[7, 8], sampling=greedy(4))
        assert list(follow.tokens) == oracle([*prompt, *result.tokens, 7, 8], greedy(4))
        # As ever, the last token of a turn has no KV.
        assert follow.cache.device_tokens == 11
        engine.assert_ledger()


def turn(turn_id: int, prompt: list[int], count: int) -> SubmitTurn:
    return SubmitTurn(
        turn_id, "local", f"s{turn_id}", prompt, 0, b"", b"", greedy(count), frozenset()
    )


def test_who_comes_beside_a_new_step_is_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ended by what is no turn, not by the time.
    monkeypatch.setattr(core, "_COMPANY_S", 60.0)
    monkeypatch.setattr(MeasuredRates, "added_s", lambda rates, num_tokens: 60.0)
    plans: list[StepPlan] = []

    class Crowded(ChecksumRunner):
        def launch(self, plan: StepPlan) -> LaterResult:
            plans.append(plan)
            if len(plans) == 1:
                built.inbox.put(turn(2, tokens(5), 2))
            if len(plans) <= 2:
                built.inbox.put(StopAt(99, 1))  # of a turn that is not known
            return super().launch(plan)

    built = Building(runner_type=Crowded, **AHEAD)(engine_config())
    try:
        front = KeepingFront(turns=2)
        front.inbox = built.inbox
        for number in (1, 2):
            built.inbox.put(OpenSession(number, "local", f"s{number}", None, None, b"", None))
        built.inbox.put(turn(1, tokens(9), 3))
        core.Core(built.parts, built.inbox, front).run()
    finally:
        built.resources.close()
    assert [[step.seq_id for step in plan.steps] for plan in plans] == [[1], [1, 2], [1, 2]]
    assert [plan.is_ahead for plan in plans] == [False, False, True]
