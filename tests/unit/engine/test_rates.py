import pytest

from sessionkv.engine.rates import HALF_LIFE_PREFILLS, MeasuredRates
from sessionkv.types import SequenceStep, StepPlan, Tier


def step_plan(*steps: tuple[int, int]) -> StepPlan:
    """Of ``(start, number of tokens)``."""
    made = [SequenceStep(i, start, [1] * n, (), n == 1) for i, (start, n) in enumerate(steps)]
    return StepPlan(1, steps=tuple(made))


def test_later_positions_cost_more_to_compute() -> None:
    rates = MeasuredRates()
    for context in (500, 8000, 500, 8000):
        rates.observe_prefill(1000, 0.1 + 1000 * context * 1e-7, context=context)
    assert rates.compute_s(0, 1000, step_tokens=1000) == pytest.approx(0.1 + 0.05)
    assert rates.compute_s(10_000, 10_100, step_tokens=1000) == pytest.approx(0.01 + 0.1005)


def test_a_fixed_cost_of_loading_is_learnt() -> None:
    rates = MeasuredRates()
    for blocks in (1, 100, 1, 100):
        rates.observe_load(Tier.DISK, blocks, blocks, 0.05 + blocks * 0.001)
    assert rates.load_costs(Tier.DISK) == pytest.approx((0.001, 0.05))
    assert rates.load_costs(Tier.HOST) == (0.0, 0.0)
    assert (rates.knows_loading(Tier.DISK), rates.knows_loading(Tier.HOST)) == (True, False)


def test_the_fixed_cost_of_a_step_is_that_of_decoding() -> None:
    rates = MeasuredRates()
    rates.observe_step(step_plan((100, 1), (200, 1)), 0.05)
    rates.observe_step(step_plan((101, 1)), 0.03)
    rates.observe_step(step_plan((0, 100)), 0.23)
    assert rates.compute_s(0, 100, step_tokens=100) == pytest.approx(0.23)
    assert rates.compute_s(0, 100, step_tokens=25) == pytest.approx(0.32)
    assert rates.last_step_s == 0.23


def test_what_tokens_add_to_a_step() -> None:
    rates = MeasuredRates()
    assert rates.added_s(100) == 0.0
    rates.observe_step(step_plan((100, 1)), 0.03)
    rates.observe_prefill(100, 0.23)
    assert rates.added_s(50) == pytest.approx(0.1)


def test_a_step_of_prefill_and_decode_together_tells_nothing() -> None:
    rates = MeasuredRates()
    rates.observe_step(step_plan((0, 100), (7, 1)), 5.0)
    assert not rates.knows_computing
    assert rates.report() == {}


def test_an_estimate_that_nothing_renews_fades() -> None:
    rates = MeasuredRates()
    rates.observe_load(Tier.HOST, 10, 1000, 0.2)
    for _ in range(HALF_LIFE_PREFILLS):
        rates.observe_prefill(100, 0.1)
    assert rates.load_costs(Tier.HOST)[0] == pytest.approx(0.02)
    for _ in range(HALF_LIFE_PREFILLS):
        rates.observe_prefill(100, 0.1)
    assert rates.load_costs(Tier.HOST)[0] == pytest.approx(0.01)
    rates.observe_load(Tier.HOST, 10, 1000, 0.2)
    assert rates.load_costs(Tier.HOST)[0] == pytest.approx(0.02)


def test_old_rates_are_forgotten() -> None:
    rates = MeasuredRates()
    for _ in range(3):
        rates.observe_load(Tier.HOST, 10, 1000, 1.0)
    for _ in range(60):
        rates.observe_load(Tier.HOST, 10, 1000, 0.01)
    assert rates.load_costs(Tier.HOST)[0] == pytest.approx(0.001, rel=0.3)


def test_empty_observations_are_ignored() -> None:
    rates = MeasuredRates()
    rates.observe_prefill(0, 1.0)
    rates.observe_load(Tier.HOST, 0, 0, 1.0)
    rates.observe_load(Tier.HOST, 5, 500, 0.0)
    assert rates.report() == {}
    rates.observe_prefill(100, 0.1)
    rates.observe_load(Tier.HOST, 10, 1000, 0.01)
    assert rates.report() == pytest.approx(
        {"host_bytes_per_s": 100_000.0, "prefill_tokens_per_s": 1000.0}
    )
