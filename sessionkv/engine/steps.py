"""The steps in flight: launched on the runner, collected in the same order.

What a step raises, at its launch or later, fails that step when its turn to be collected comes.
Core thread only.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from sessionkv.engine.parts import CoreParts
from sessionkv.engine.runner import LaunchedStep
from sessionkv.engine.scheduler.sequence import SequenceEvent
from sessionkv.types import StepOutput, StepPlan

_log = logging.getLogger(__name__)


class _InFlight(NamedTuple):
    """``step`` is the exception where it could not be launched."""

    plan: StepPlan
    step: LaunchedStep | Exception
    at_s: float
    is_held: bool


class Steps:
    """At most two: one, and one that was planned ahead."""

    def __init__(self, parts: CoreParts, clock: Callable[[], float]) -> None:
        """Nothing is in flight."""
        self._parts = parts
        self._clock = clock
        self._in_flight: deque[_InFlight] = deque()
        self._collected_at = clock()

    def __len__(self) -> int:
        """Steps launched and not collected."""
        return len(self._in_flight)

    @property
    def may_go_on(self) -> bool:
        """Whether a step is to be planned ahead, after the one in flight."""
        if len(self._in_flight) != 1 or isinstance(self._in_flight[0].step, Exception):
            return False
        return self._parts.runner.plans_ahead

    def launch(self, plan: StepPlan, *, is_held: bool = False) -> None:
        """Have the runner begin with a plan; ``is_held`` is one that waits for copies first."""
        began = self._clock()
        step: LaunchedStep | Exception
        try:
            step = self._parts.runner.launch(plan)
        except Exception as failure:  # noqa: BLE001 - the actor's one boundary
            step = failure
        self._in_flight.append(_InFlight(plan, step, began, is_held))

    def collect(self) -> list[SequenceEvent]:
        """Wait for the oldest step and commit it; what it did to its sequences."""
        oldest = self._in_flight.popleft()
        plan, step, launched_at, _ = oldest
        scheduler = self._parts.scheduler
        began = max(launched_at, self._collected_at)
        try:
            if isinstance(step, Exception):
                raise step
            output = step.result()
        except Exception as failure:  # noqa: BLE001 - the actor's one boundary
            _log.exception("step %d failed", plan.step_id)
            self._collected_at = self._clock()
            return scheduler.fail_step(plan, failure)
        now = self._collected_at = self._clock()
        events = scheduler.commit(plan, output, now)
        self._count(oldest, events, now - began)
        self._learn(oldest, output, now - began)
        return events

    def _count(self, step: _InFlight, events: list[SequenceEvent], elapsed_s: float) -> None:
        """Count a step by the time for which nobody else had the device."""
        plan = step.plan
        if plan.is_ahead:
            num_tokens = sum(event.token is not None for event in events)
            self._parts.metrics.step(plan, elapsed_s, num_dropped=len(plan.steps) - num_tokens)
        else:
            self._parts.metrics.step(plan, elapsed_s)

    def _learn(self, step: _InFlight, output: StepOutput, elapsed_s: float) -> None:
        """Have the planner learn what a step costs, where that is known.

        One that was made ahead may have ended long before it was collected, and one that was held
        began late. Where core has other things to do beside a step, and waits for company, only the
        device's own clock tells when it ended: else that wait would count as computing, and as it
        lasts as long as computing is thought to, it would grow by itself.
        """
        computed_s = output.computed_s
        if computed_s is None and not self._parts.runner.plans_ahead:
            computed_s = elapsed_s
        if computed_s is not None and not (step.plan.is_ahead or step.is_held):
            self._parts.planner.rates.observe_step(step.plan, computed_s)
