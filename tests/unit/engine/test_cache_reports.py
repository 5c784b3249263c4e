"""Reports that are kept are bounded; past the bound who has most loses the oldest."""

from typing import cast

from sessionkv.engine.cache_reports import CacheReports
from sessionkv.types import CacheReport
from sessionkv.types.node_ids import first_of


def report_of_a_turn() -> CacheReport:
    """Told apart by being itself."""
    return cast(CacheReport, object())


A, B = first_of(1), first_of(2)


def test_who_has_most_loses_the_oldest() -> None:
    kept, report = CacheReports(most=4), report_of_a_turn()
    for node_id in (B + 1, A + 1, A + 2, A + 3, A + 4, A + 5, B + 2):
        kept.put(node_id, report)
    assert [kept.get(B + i) is report for i in (1, 2)] == [True, True]
    assert [kept.get(A + i) is report for i in range(1, 6)] == [False, False, False, True, True]


def test_what_is_forgotten_takes_no_place() -> None:
    kept, report = CacheReports(most=2), report_of_a_turn()
    kept.put(A + 1, report)
    kept.put(B + 1, report)
    kept.pop(A + 1)
    kept.pop(A + 1)
    kept.put(A + 2, report)
    assert kept.get(A + 1) is None
    assert kept.get(B + 1) is kept.get(A + 2) is report
