"""Planned turns against pure loading and pure computing, with real parts on a virtual clock.

Exact: nothing here depends on the machine. ``benchmarks.store.planner`` has all lengths and ratios.
"""

from __future__ import annotations

import pytest

from benchmarks.store.planner import MACHINES, has_room, run

SMALL, LARGE = MACHINES


@pytest.mark.parametrize("machine", MACHINES, ids=["small", "large"])
@pytest.mark.parametrize("num_history", [256, 1024, 8192])
def test_planned_is_never_much_later_than_the_better_of_the_two(machine, num_history: int) -> None:
    for ratio in (0.05, 0.3, 0.7, 1.0, 1.4, 5.0, 20.0):
        outcome = run(machine, num_history, ratio)
        assert outcome.over_best <= 1.05, outcome
        if 0.7 <= ratio <= 1.4 and has_room(machine, num_history):
            assert outcome.over_best <= 0.8, outcome


def test_the_longest_history_meets_both_bars() -> None:
    outcome = run(LARGE, 131_072, 1.0)
    assert outcome.over_best <= 0.8, outcome
    assert 0 < outcome.loaded_tokens < 131_072


def test_the_split_follows_the_rates() -> None:
    shares = [run(SMALL, 4096, ratio).loaded_tokens for ratio in (0.05, 0.2, 1.0, 5.0, 20.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.9 * 4096
    assert shares[-1] < 0.1 * 4096


def test_a_disk_unlike_what_was_measured_is_noticed_on_the_way() -> None:
    """What was claimed or begun before that stands: one step, and loads for about as long."""
    slower = run(SMALL, 8192, 0.5, surprise=10.0)
    assert slower.planned_s < slower.compute_s < slower.load_s
    faster = run(SMALL, 8192, 0.5, surprise=0.1)
    one_step_s = SMALL.step_s([(0, SMALL.step_tokens)])
    assert faster.planned_s < faster.load_s + 2 * one_step_s
