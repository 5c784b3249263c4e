"""Whole engines that launch the next step before the last one is collected."""

from sessionkv.text.builtin import IM_END
from sessionkv.types import FinishReason, StepPlan
from tests.builders.checksum import tokens
from tests.builders.engine import engine_config, greedy, open_engine, oracle

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
