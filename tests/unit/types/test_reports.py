import pytest

from sessionkv.types import CacheReport, MissReason, MissReport


def report(**changes: object) -> CacheReport:
    values = {
        "prompt_tokens": 2045, "device_tokens": 1984, "host_tokens": 16, "disk_tokens": 0,
        "computed_tokens": 45, "ttft_ms": 310.4, "decode_tokens_per_s": 42.123,
    } | changes  # fmt: skip
    return CacheReport(**values)


def test_report_names_every_source_and_the_sum() -> None:
    assert str(report()) == (
        "prompt 2,045 = 1,984 device + 16 host + 0 disk + 45 computed"
        " · first token 310 ms · 42.1 tok/s · no miss"
    )


def test_report_counts_work_done_again_apart() -> None:
    line = str(report(recomputed_tokens=64, decode_tokens_per_s=0.0))
    assert line.endswith("first token 310 ms · 64 recomputed · no miss")


@pytest.mark.parametrize(
    ("miss", "text"),
    [
        (MissReport(), "no miss"),
        (MissReport(MissReason.FIRST_TURN, token=0), "miss: first_turn"),
        (MissReport(MissReason.EVICTED, token=1200), "miss: evicted from token 1,200"),
        (
            MissReport(MissReason.HISTORY_EDITED, token=7, turn=2, expected="red", found="blue"),
            "miss: history_edited from token 7 (turn 2), 'red' became 'blue'",
        ),
    ],
)
def test_miss_says_reason_place_and_difference(miss: MissReport, text: str) -> None:
    assert str(miss) == text
