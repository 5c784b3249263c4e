"""How long nothing ran on a device, from begin and end of what did."""

from __future__ import annotations

from benchmarks.gpu.gaps import gaps_of, rows_of


def test_only_what_nothing_covers_is_a_gap() -> None:
    spans = [(20, 30), (0, 10), (5, 8), (30, 32), (28, 29), (40, 50)]
    assert gaps_of(spans) == ([10, 8], 50)
    assert gaps_of([(3, 7)]) == ([], 4)


def test_shares_are_of_the_whole_and_long_gaps_are_told_apart() -> None:
    rows = list(rows_of(4, [(0, 70_000), (71_000, 90_000), (99_000, 100_000)]))
    assert [row.value for row in rows[:2]] == [0.1, 0.09]
    assert rows[0].met is False
