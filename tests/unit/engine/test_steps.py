"""Steps in flight: what the planner learns of their cost, and what it does not."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from sessionkv.engine.rates import MeasuredRates
from sessionkv.engine.runner import LaterResult
from sessionkv.engine.steps import Steps
from sessionkv.types import PENDING, SequenceStep, StepOutput, StepPlan

PREFILL = StepPlan(1, steps=(SequenceStep(1, 0, [1] * 100, (), False),))
AHEAD = StepPlan(1, steps=(SequenceStep(1, 5, [PENDING], (), True),))


@dataclass
class Bench:
    """Steps over a runner whose steps take, by its own clock, ``computed_s``."""

    computed_s: float | None
    plans_ahead: bool = True
    now: float = 0.0
    rates: MeasuredRates = field(default_factory=MeasuredRates)

    def launch(self, plan: StepPlan) -> LaterResult:
        return LaterResult(lambda: StepOutput(plan.step_id, computed_s=self.computed_s))

    def learnt(self, plan: StepPlan, *, is_held: bool = False) -> float:
        """What the planner takes for the last step's cost, where core collects it 5 s later."""
        parts: Any = SimpleNamespace(
            runner=self,
            scheduler=SimpleNamespace(commit=lambda plan, output, now: []),
            metrics=SimpleNamespace(step=lambda plan, elapsed_s, **fields: None),
            planner=SimpleNamespace(rates=self.rates),
        )
        steps = Steps(parts, lambda: self.now)
        steps.launch(plan, is_held=is_held)
        self.now += 5.0
        steps.collect()
        return self.rates.last_step_s


def test_what_core_does_beside_a_step_is_no_part_of_its_cost() -> None:
    bench = Bench(computed_s=0.02)
    assert bench.learnt(PREFILL) == 0.02
    assert bench.rates.added_s(100) == pytest.approx(0.02)


def test_without_a_clock_of_the_device_nothing_is_learnt_where_core_goes_on_meanwhile() -> None:
    assert Bench(computed_s=None).learnt(PREFILL) == 0.0


def test_where_core_only_waits_a_step_costs_what_it_waited() -> None:
    assert Bench(computed_s=None, plans_ahead=False).learnt(PREFILL) == 5.0


@pytest.mark.parametrize("computed_s", [None, 0.02])
def test_a_step_made_ahead_or_held_teaches_nothing(computed_s: float | None) -> None:
    assert Bench(computed_s).learnt(AHEAD) == 0.0
    assert Bench(computed_s).learnt(PREFILL, is_held=True) == 0.0
