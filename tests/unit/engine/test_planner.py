import pytest

from sessionkv.engine.planner import HALF_LIFE_PREFILLS, LoadChoice, LoadPlanner
from sessionkv.types import Match, MissReason, Tier

LOAD_ALL = LoadChoice(use_host=True, use_disk=True, reason=None)
SOONER = MissReason.RECOMPUTE_WAS_SOONER


def planner(*, prefill_s=0.001, host_s=None, disk_s=None):
    """Rates: seconds for a token, and for a block of 16 tokens from each tier."""
    made = LoadPlanner(block_size=16)
    for _ in range(3):
        if host_s is not None:
            made.observe_load(Tier.HOST, 10, 1000, 10 * host_s)
        if disk_s is not None:
            made.observe_load(Tier.DISK, 10, 1000, 10 * disk_s)
        if prefill_s is not None:
            made.observe_prefill(100, 100 * prefill_s, context=50)
    return made


@pytest.mark.parametrize(
    "rates",
    [
        {"prefill_s": None},
        {"prefill_s": 1e-9},
        {"prefill_s": None, "host_s": 100.0, "disk_s": 100.0},
    ],
)
def test_what_is_not_measured_is_loaded(rates):
    assert planner(**rates).decide(Match(16, 160, 160), 400, 0) == LOAD_ALL


def test_a_tier_faster_than_computing_is_used_and_a_slower_one_is_not():
    match = Match(0, 160, 160)
    fast, slow = 0.001, 0.1  # a block takes 16 ms to compute
    assert planner(host_s=fast, disk_s=fast).decide(match, 400, 0) == LOAD_ALL
    assert planner(host_s=fast, disk_s=slow).decide(match, 400, 0) == LoadChoice(
        use_host=True, use_disk=False, reason=SOONER
    )
    assert planner(host_s=slow, disk_s=slow).decide(match, 400, 0) == LoadChoice(
        use_host=False, use_disk=False, reason=SOONER
    )


def test_a_slow_host_is_used_where_it_opens_the_way_to_much_on_disk():
    rates = {"host_s": 0.02, "disk_s": 0.001}
    assert planner(**rates).decide(Match(0, 16, 1600), 2000, 0) == LOAD_ALL
    assert planner(**rates).decide(Match(0, 160, 16), 2000, 0).use_host is False


def test_a_tier_with_nothing_is_no_reason():
    choice = planner(host_s=0.1, disk_s=0.001).decide(Match(0, 0, 160), 400, 0)
    assert choice.use_disk
    assert choice.reason is None


def test_queued_turns_make_loading_worth_more():
    rates = planner(host_s=0.02)  # a block takes 16 ms to compute, 20 to load
    match = Match(0, 160, 0)
    assert rates.decide(match, 400, 0).use_host is False
    assert rates.decide(match, 400, 400).use_host is True


def test_later_positions_cost_more_to_compute():
    made = LoadPlanner(block_size=16)
    for context in (500, 8000, 500, 8000):
        made.observe_prefill(1000, 0.1 + 1000 * context * 1e-7, context=context)
    made.observe_load(Tier.HOST, 10, 1000, 10 * 0.005)
    # 16 tokens: 1.6 ms at the start, 1.6 + 16 ms at position 10,000; a load takes 5 ms.
    assert made.decide(Match(0, 16, 0), 32, 0).use_host is False
    assert made.decide(Match(10_000, 16, 0), 10_032, 0).use_host is True


def test_a_fixed_cost_of_loading_is_learnt():
    made = planner()
    for blocks in (1, 100, 1, 100):
        made.observe_load(Tier.DISK, blocks, blocks, 0.05 + blocks * 0.001)
    assert made.decide(Match(0, 0, 16), 400, 0).use_disk is False
    assert made.decide(Match(0, 0, 320), 400, 0).use_disk is True


def test_a_tier_that_is_not_used_is_tried_again_in_time():
    made = planner(host_s=0.02)
    match = Match(0, 160, 0)
    assert made.decide(match, 400, 0).use_host is False
    for _ in range(HALF_LIFE_PREFILLS):
        made.observe_prefill(100, 0.1, context=50)
    assert made.decide(match, 400, 0).use_host is True
    made.observe_load(Tier.HOST, 10, 1000, 0.2)
    assert made.decide(match, 400, 0).use_host is False


def test_old_rates_are_forgotten():
    made = planner(host_s=0.1)
    for _ in range(60):
        made.observe_load(Tier.HOST, 10, 1000, 0.01)
    assert made.decide(Match(0, 160, 0), 400, 0).use_host is True


def test_deciding_changes_nothing():
    made = planner(host_s=0.02)
    answers = {made.decide(Match(0, 160, 0), 400, 0) for _ in range(1000)}
    assert len(answers) == 1


def test_empty_observations_are_ignored():
    made = planner(host_s=0.001)
    made.observe_prefill(0, 1.0)
    made.observe_load(Tier.HOST, 0, 0, 1.0)
    made.observe_load(Tier.HOST, 5, 500, 0.0)
    assert made.rates() == pytest.approx(
        {"host_bytes_per_s": 100_000.0, "prefill_tokens_per_s": 1000.0}
    )
