import random
from dataclasses import replace

import pytest

from sessionkv.engine.histogram import Histogram
from sessionkv.engine.messages import TurnFinished
from sessionkv.engine.metrics import Gauges, Metrics, TierGauge
from sessionkv.types import (
    BlockHash,
    BlockMove,
    BlockRecord,
    CacheReport,
    FinishReason,
    MissReason,
    MissReport,
    MoveOutcome,
    SamplingParams,
    SequenceStart,
    SequenceStep,
    StepPlan,
    Tier,
    Transfer,
    TransferResult,
)

EMPTY_TIER = TierGauge(0, 0, 0, 0, 0)
IDLE = Gauges(0, 0, 0, 0, 0, 0, 0, 0, dict.fromkeys(Tier, EMPTY_TIER))


def plan(*steps: tuple[int, bool]) -> StepPlan:
    """A step for each pair: its number of tokens, and whether it samples."""
    return StepPlan(
        1, steps=tuple(SequenceStep(i, 0, [7] * n, (), s) for i, (n, s) in enumerate(steps))
    )


def finished(**report: object) -> TurnFinished:
    cache = CacheReport(100, 40, 20, 10, 30, **report)  # type: ignore[arg-type]
    return TurnFinished(1, 5, FinishReason.STOP, 2, 3, 100, cache)


def tokens(values):
    return values["computed_prompt_tokens"], values["generation_tokens"]


def test_steps_count_prompt_and_sampled_tokens():
    metrics = Metrics()
    metrics.step(plan((64, False), (10, True), (1, True), (1, True)), 0.02)
    metrics.step(plan((1, False)), 0.01)
    values = metrics.snapshot(1.0, IDLE)
    assert tokens(values) == (64 + 10 + 1, 3)
    assert values["steps"] == 2
    assert values["latency"]["inter_token"]["count"] == 2
    assert values["latency"]["inter_token"]["mean_ms"] == pytest.approx(20.0)
    assert values["latency"]["step"]["mean_ms"] == pytest.approx(15.0)


def test_the_last_token_of_a_cached_prompt_is_prompt():
    metrics = Metrics()
    start = SequenceStart(0, (1,), 16, [7] * 17, 17, SamplingParams(), frozenset())
    metrics.step(replace(plan((1, True), (1, True)), starts=(start,)), 0.02)
    values = metrics.snapshot(1.0, IDLE)
    assert tokens(values) == (1, 2)
    assert values["latency"]["inter_token"]["count"] == 1


def test_turns_sum_their_cache_reports():
    metrics = Metrics()
    miss = MissReport(MissReason.EVICTED, token=70)
    times = {"queue_ms": 1.0, "prefill_ms": 2.0, "fetch_ms": 4.0, "ttft_ms": 8.0}
    metrics.turn_finished(
        finished(miss=miss, miss_tokens={"evicted": 29}, recomputed_tokens=6, **times), 0.5
    )
    metrics.turn_finished(finished(), 0.5)
    metrics.turn_dropped("turn_cancelled")
    values = metrics.snapshot(1.0, IDLE)
    assert values["prefix_cache"] == {
        "queries_tokens": 200,
        "hits_tokens": 140,
        "hit_rate": 0.7,
        "queries_blocks": 0,
        "hits_blocks": 0,
        "block_hit_rate": 0.0,
        "device_tokens": 80,
        "host_tokens": 40,
        "disk_tokens": 20,
    }
    assert values["prompt_tokens"] == 200
    assert values["recomputed_tokens"] == 6
    assert values["requests_finished"] == {"stop": 2}
    assert values["requests_failed"] == {"turn_cancelled": 1}
    assert values["miss_tokens"] == {"evicted": 29}
    assert values["miss_turns"] == {"evicted": 1, "none": 1}
    assert values["latency"]["e2e"]["mean_ms"] == pytest.approx(500.0)
    assert values["latency"]["ttft"]["mean_ms"] == pytest.approx(4.0)


def test_transfers_count_what_arrived_by_pair_of_tiers():
    metrics = Metrics()
    record = BlockRecord(BlockHash(b"k"), BlockHash(b"p"), (1,))
    moves = tuple(BlockMove(record, i, i) for i in range(4))
    outcomes = (MoveOutcome.OK, MoveOutcome.CORRUPT, MoveOutcome.OK, MoveOutcome.MISSING)
    fetch = Transfer(1, Tier.DISK, Tier.DEVICE, moves)
    metrics.transfer(fetch, TransferResult(1, outcomes, 0.5), 400)
    metrics.transfer(
        Transfer(2, Tier.DEVICE, Tier.HOST, moves[:1]),
        TransferResult(2, outcomes[:1], 0.25),
        100,
    )
    assert metrics.snapshot(1.0, IDLE)["transfers"] == {
        "disk_to_device": {
            "transfers": 1,
            "blocks": 2,
            "moved_bytes": 200,
            "failed_blocks": 2,
            "busy_s": 0.5,
        },
        "device_to_host": {
            "transfers": 1,
            "blocks": 1,
            "moved_bytes": 100,
            "failed_blocks": 0,
            "busy_s": 0.25,
        },
    }


def test_memory_is_reported_with_waste_and_against_reserving_the_maximum():
    gauges = replace(
        IDLE,
        running_bytes=250,
        preallocated_bytes=1000,
        tiers={**IDLE.tiers, Tier.DEVICE: TierGauge(400, 800, 3, 100, 7, 2, 5, 1)},
    )
    kv = Metrics().snapshot(1.0, gauges)["kv"]
    assert kv["device"] == {
        "used_bytes": 400,
        "cap_bytes": 800,
        "usage_rate": 0.5,
        "leased_blocks": 3,
        "wasted_bytes": 100,
        "waste_rate": 0.25,
        "evictions": 7,
        "evictions_waited": 2,
        "clean_blocks": 5,
        "dirty_blocks": 1,
    }
    assert (kv["running_bytes"], kv["preallocated_bytes"], kv["saved_rate"]) == (250, 1000, 0.75)


def test_throughput_is_over_the_last_ten_and_sixty_seconds():
    metrics = Metrics()
    for second in range(100):
        metrics.log_line(float(second))
        if second < 90:
            metrics.step(plan((9, False), (1, True)), 0.1)
    metrics.log_line(100.0)
    rates = metrics.snapshot(100.0, IDLE)["throughput"]
    assert rates == {
        "prompt_tokens_per_second_10s": 0.0,
        "generation_tokens_per_second_10s": 0.0,
        "prompt_tokens_per_second_60s": pytest.approx(9 * 50 / 60),
        "generation_tokens_per_second_60s": pytest.approx(50 / 60),
    }


def test_memory_of_rates_is_bounded():
    metrics = Metrics()
    for tick in range(10_000):
        metrics.log_line(tick * 0.5)
    assert len(metrics._samples) == 128


def test_a_line_every_ten_seconds_while_busy():
    metrics = Metrics()
    lines = []
    for second in range(45):
        if second in (3, 4, 25):
            metrics.step(plan((1, True)), 0.01)
        line = metrics.log_line(float(second))
        if line is not None:
            lines.append((second, line))
    assert [second for second, _ in lines] == [10, 30]
    assert lines[0][1] == (
        "1 in the batch, prompt 0 tokens/s, generation 0 tokens/s, 0 turns, hit rate 0.0%, "
        "TTFT p50 0.0 ms, inter-token p50 9.7 ms, fetched 0.0 MiB, spilled 0.0 MiB"
    )


def advice(looked_up: int, hit: int, evictions: int) -> list[str]:
    tier = replace(EMPTY_TIER, evictions=evictions)
    gauges = replace(
        IDLE,
        looked_up_blocks=looked_up,
        hit_blocks=hit,
        tiers={**IDLE.tiers, Tier.DEVICE: tier},
    )
    return Metrics().advice(gauges)


@pytest.mark.parametrize(
    ("looked_up", "hit", "evictions", "word"),
    [
        (999, 0, 0, None),
        (1000, 199, 0, "cache.prefix_cache"),
        (1000, 200, 5, None),
        (1000, 501, 0, None),
        (1000, 501, 1, "cache.device_bytes"),
        (1000, 500, 1, None),
    ],
)
def test_advice_where_the_hit_rate_says_something(looked_up, hit, evictions, word):
    found = advice(looked_up, hit, evictions)
    assert (word is None) == (found == [])
    if word is not None:
        assert word in found[0]


def test_book_errors_are_counted():
    metrics = Metrics()
    metrics.count_book_error()
    assert metrics.snapshot(1.0, IDLE)["book_errors"] == 1


def test_snapshot_is_plain_and_the_callers_own():
    metrics = Metrics()
    metrics.turn_finished(finished(), 0.1)
    values = metrics.snapshot(1.0, IDLE)
    values["requests_finished"]["stop"] = 99
    assert metrics.snapshot(1.0, IDLE)["requests_finished"] == {"stop": 1}

    def plain(value):
        if isinstance(value, dict):
            return all(type(key) is str and plain(item) for key, item in value.items())
        if isinstance(value, list):
            return all(plain(item) for item in value)
        return type(value) in (int, float, str)

    assert plain(values)


def test_quantiles_are_within_five_percent():
    chosen = random.Random(3)
    lengths = [chosen.lognormvariate(-5, 2) for _ in range(5000)]
    histogram = Histogram()
    for length in lengths:
        histogram.observe(length)
    lengths.sort()
    for share in (0.5, 0.9, 0.99):
        exact = lengths[int(share * len(lengths)) - 1]
        assert histogram.quantile_s(share) == pytest.approx(exact, rel=0.05)
    assert histogram.to_map()["mean_ms"] == pytest.approx(sum(lengths) / len(lengths) * 1000)


def test_lengths_outside_the_range_count_at_its_ends():
    histogram = Histogram()
    for length in (-1.0, 0.0, 1e-12, 1e12):
        histogram.observe(length)
    assert histogram.count == 4
    assert histogram.quantile_s(0.5) < 2e-6
    assert histogram.quantile_s(1.0) > 1e5
    assert Histogram().quantile_s(0.5) == 0.0


def test_fixed_buckets_hold_all_that_was_no_longer() -> None:
    histogram = Histogram()
    for seconds in (0.00001, 0.003, 0.003, 0.9, 1.5, 5000.0):
        histogram.observe(seconds)
    buckets = dict(map(tuple, histogram.buckets()))
    assert min(buckets) == 2.0**-13
    assert max(buckets) == 2048.0
    assert buckets[2.0**-13] == 1  # 0.12 ms
    assert (buckets[2.0**-9], buckets[2.0**-8]) == (1, 3)  # 2.0 and 3.9 ms
    assert (buckets[0.5], buckets[1.0], buckets[2.0]) == (3, 4, 5)
    assert buckets[2048.0] == 5
    assert histogram.to_map()["sum_s"] == pytest.approx(5002.40601)
