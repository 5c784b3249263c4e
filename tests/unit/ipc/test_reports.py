from __future__ import annotations

from sessionkv.ipc.reports import cache_from_map, cache_to_map, usage_from_map, usage_to_map
from sessionkv.types import CacheReport, MissReason, MissReport, Usage

REPORT = CacheReport(
    prompt_tokens=10,
    device_tokens=4,
    host_tokens=2,
    disk_tokens=1,
    computed_tokens=3,
    recomputed_tokens=5,
    queue_ms=1.5,
    decode_tokens_per_s=9.0,
    miss=MissReport(MissReason.EVICTED, token=7, turn=2, message=1, expected="a", found="b"),
    miss_tokens={"evicted": 3},
)


def test_reports_survive_the_way():
    assert cache_from_map(cache_to_map(REPORT)) == REPORT
    assert usage_from_map(usage_to_map(Usage(3, 4))) == Usage(3, 4)


def test_a_report_may_be_empty_have_new_fields_and_new_reasons():
    assert cache_from_map({}) == CacheReport(0, 0, 0, 0, 0)
    grown = {**cache_to_map(REPORT), "new": 1, "miss": {"reason": "sunspots", "token": 7}}
    assert cache_from_map(grown).miss == MissReport(MissReason.NOT_MATCHED, token=7)
