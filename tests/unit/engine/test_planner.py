import pytest

from sessionkv.engine.planner import PROBE_BLOCKS, UNMEASURED_PATIENCE_S, LoadPlanner
from sessionkv.engine.scheduler.policy import Claims, Lane, Workload
from sessionkv.types import Meeting, Tier

HOST, DISK = Tier.HOST, Tier.DISK
STEP = 256


def planner(
    *, prefill_s: float | None = 0.001, host_s: float | None = None, disk_s: float | None = None
) -> LoadPlanner:
    """Rates: seconds for a token, and for a block of 16 tokens from each tier."""
    made = LoadPlanner(block_size=16)
    for _ in range(3):
        if host_s is not None:
            made.rates.observe_load(HOST, 10, 1000, 10 * host_s)
        if disk_s is not None:
            made.rates.observe_load(DISK, 10, 1000, 10 * disk_s)
        if prefill_s is not None:
            made.rates.observe_prefill(100, 100 * prefill_s, context=0)
    return made


def test_the_disk_is_asked_for_as_long_as_its_answer_is_worth() -> None:
    patience_s = planner(prefill_s=0.004).patience_s(1500, 2000, step_tokens=STEP)
    assert patience_s == pytest.approx(0.25 * 500 * 0.004)
    unknown = planner(prefill_s=None)
    assert unknown.patience_s(0, 200, step_tokens=STEP) == pytest.approx(0.2)
    assert unknown.patience_s(0, 20_000, step_tokens=STEP) == UNMEASURED_PATIENCE_S


def found(
    host: int = 0, disk: int = 0, *, front: int = 0, limit: int | None = None, loading: int = 0
) -> Meeting:
    """So many unclaimed blocks, the host's before the disk's, from block ``front`` on."""
    middle, end = front + host, front + host + disk
    unclaimed = {HOST: list(range(front, middle)), DISK: list(range(middle, end))}
    return Meeting(
        front_tokens=front * 16,
        end_tokens=(end + loading) * 16,
        limit_tokens=None if limit is None else limit * 16,
        unclaimed=unclaimed,
        loading={DISK: loading},
    )


def work(meeting: Meeting, *, new: int = 16, others: int = 0, **lanes: Lane) -> Workload:
    return Workload(
        num_tokens=meeting.end_tokens + new,
        step_tokens=STEP,
        other_tokens=others,
        lanes={Tier(name): lane for name, lane in lanes.items()},
    )


@pytest.mark.parametrize("known", [{}, {"host_s": 100.0, "disk_s": 100.0}])
def test_before_computing_was_measured_everything_is_loaded(known: dict[str, float]) -> None:
    meeting = found(10, 200)
    claims = planner(prefill_s=None, **known).meet(meeting, work(meeting))
    assert claims == Claims(0, {HOST: 10, DISK: 200})


def test_a_tier_that_was_not_measured_is_tried_before_anything_is_computed() -> None:
    meeting = found(disk=200)
    made = planner()
    assert made.meet(meeting, work(meeting)) == Claims(0, {DISK: PROBE_BLOCKS})
    waiting = work(meeting, disk=Lane(8, 8, 0.05))
    assert made.meet(meeting, waiting) == Claims(0, {})
    # One that does not answer is not waited for: 8 blocks in 2 s, and 16 ms to compute one.
    claims = made.meet(meeting, work(meeting, disk=Lane(8, 8, 2.0)))
    assert claims.compute_tokens is None or claims.compute_tokens > 1000


def test_they_meet_where_both_take_as_long() -> None:
    meeting = found(disk=100)
    claims = planner(disk_s=0.016).meet(meeting, work(meeting))
    assert claims.compute_tokens == 50 * 16
    claims = planner(disk_s=0.004).meet(meeting, work(meeting))
    assert claims == Claims(20 * 16, {DISK: 80})


def test_a_much_faster_tier_is_loaded_and_a_much_slower_one_is_not() -> None:
    meeting = found(disk=20)
    assert planner(disk_s=0.0001).meet(meeting, work(meeting)) == Claims(0, {DISK: 20})
    assert planner(disk_s=10.0).meet(meeting, work(meeting)) == Claims(None)


def test_both_at_once_are_worth_it_only_where_they_gain_enough() -> None:
    meeting = found(disk=100)
    # 16 ms to compute a block; with loads seven times as fast computing would save an eighth.
    worth = planner(disk_s=0.0026).meet(meeting, work(meeting, new=1))
    assert worth == Claims(14 * 16, {DISK: 86})
    assert planner(disk_s=0.002).meet(meeting, work(meeting, new=1)).compute_tokens == 0
    # Loading beside a computation costs nobody anything.
    slow = planner(disk_s=0.2).meet(meeting, work(meeting, new=1))
    assert slow.compute_tokens == 93 * 16
    assert slow.loads[DISK] > 0


def test_a_bus_is_kept_busy_by_claiming_all_at_once() -> None:
    meeting = found(2048)
    made = planner(prefill_s=34e-6, host_s=47e-6)
    assert made.meet(meeting, work(meeting, new=64)) == Claims(0, {HOST: 2048})


def test_what_was_claimed_before_makes_computing_the_rest_worth_no_more() -> None:
    """Loads ten times as fast as computing, of which three quarters are under way already."""
    made = planner(prefill_s=27e-6, host_s=43e-6)
    meeting = found(128, limit=128, loading=1024)
    lanes = {"host": Lane(1024, 64, 0.0)}
    assert made.meet(meeting, work(meeting, new=64, **lanes)) == Claims(0, {HOST: 128})
    # Loads as slow as that are worth being computed beside.
    slow = planner(prefill_s=27e-6, host_s=430e-6).meet(meeting, work(meeting, new=64, **lanes))
    assert slow.compute_tokens == 128 * 16


def test_tiers_load_side_by_side_each_at_its_own_rate() -> None:
    meeting = found(50, 50)
    claims = planner(host_s=0.001, disk_s=0.008).meet(meeting, work(meeting))
    # The disk takes 0.4 s whatever is computed of the host's part, and the host is done by then.
    assert claims == Claims(0, {HOST: 50, DISK: 14})
    claims = planner(host_s=0.03, disk_s=0.008).meet(meeting, work(meeting))
    assert claims.compute_tokens == 33 * 16  # (50 - 33) * 30 ms


def test_no_more_is_claimed_than_keeps_loads_busy_during_the_step() -> None:
    meeting = found(disk=2000)
    claims = planner(disk_s=0.016).meet(meeting, work(meeting))
    # A step of 256 ms, and some slack, at 16 ms a block.
    assert claims.compute_tokens == 1000 * 16
    assert 16 < claims.loads[DISK] < 40
    under_way = claims.loads[DISK]
    again = planner(disk_s=0.016).meet(meeting, work(meeting, disk=Lane(under_way, 32, 0.0)))
    assert again.loads == {}


def test_a_slow_tier_is_asked_for_two_blocks_at_a_time() -> None:
    meeting = found(disk=1000)
    claims = planner(disk_s=1.0).meet(meeting, work(meeting))
    assert claims.loads == {DISK: 2}
    claims = planner(disk_s=1.0).meet(meeting, work(meeting, disk=Lane(1, 1, 0.5)))
    assert claims.loads == {DISK: 1}


def test_a_tier_that_would_run_dry_within_a_step_is_asked_for_more() -> None:
    """Of a load under way counts what is foreseen to be left, as soon as that ends too early."""
    meeting = found(disk=1000)
    made = planner(disk_s=0.01)
    wanted = made.meet(meeting, work(meeting)).loads[DISK]
    step_s = 1.5 * STEP * 0.001
    assert wanted == 2 + int((0.1 + step_s) / 0.01)
    for age_s, left in ((0.0, wanted), (0.1, wanted - 10), (0.2, wanted - 20), (0.5, 1)):
        claims = made.meet(meeting, work(meeting, disk=Lane(wanted, wanted, age_s)))
        ends_too_early = left * 0.01 < step_s
        assert claims.loads.get(DISK, 0) == (wanted - left if ends_too_early else 0)


def test_what_others_wait_for_makes_loading_worth_more() -> None:
    meeting = found(disk=100)
    made = planner(disk_s=0.016)
    assert made.meet(meeting, work(meeting)).compute_tokens == 50 * 16
    assert made.meet(meeting, work(meeting, others=10 * 1616)).compute_tokens == 0


def test_a_load_that_lags_gives_the_rest_to_computing() -> None:
    meeting = found(disk=100, loading=20, limit=100)
    made = planner(disk_s=0.0001)
    in_time = made.meet(meeting, work(meeting, disk=Lane(20, 20, 0.001)))
    assert in_time == Claims(0, {DISK: 100})
    late = made.meet(meeting, work(meeting, disk=Lane(20, 20, 1.0)))
    assert late.compute_tokens is not None
    assert late.compute_tokens > 80 * 16


def test_what_could_not_be_loaded_is_computed_up_to_what_comes_next() -> None:
    lost = Meeting(
        front_tokens=32,
        end_tokens=160,
        limit_tokens=64,
        unclaimed={HOST: [], DISK: []},
        loading={DISK: 3},
    )
    assert planner(disk_s=1e-6).meet(lost, work(lost)) == Claims(64, {})
    ahead = Meeting(
        front_tokens=32, end_tokens=160, limit_tokens=None, unclaimed={HOST: [4, 5], DISK: []}
    )
    assert planner(host_s=1e-6).meet(ahead, work(ahead)) == Claims(64, {HOST: 2})


def test_steps_have_a_fixed_cost_that_few_blocks_do_not_repay() -> None:
    made = planner(prefill_s=None, disk_s=0.02)
    made.rates._fixed_s = 1.0
    made.rates.observe_prefill(100, 1.1)
    meeting = found(disk=10)
    # 0.2 s to load them; computing them needs no step more than the new tokens do.
    assert made.meet(meeting, work(meeting)).compute_tokens is None
    # Here they would be a step of their own, while 0.4 s of loads are under way or left.
    meeting = found(disk=10, limit=10, loading=10)
    assert made.meet(meeting, work(meeting, disk=Lane(10, 10))) == Claims(0, {})


def test_deciding_changes_nothing() -> None:
    made = planner(disk_s=0.02)
    meeting = found(10, 50)
    assert all(
        made.meet(meeting, work(meeting)) == made.meet(meeting, work(meeting)) for _ in range(9)
    )
