"""The frame of the benchmarks: medians, ratios, bounds, and what is printed."""

import json

from benchmarks import report


def test_median_and_bounds() -> None:
    row = report.median_row("a", [3.0, 1.0, 2.0], "ms", bound=("<=", 2.0))
    assert (row.value, row.n, row.met) == (2.0, 3, True)
    assert report.Row("b", 1.4, "x", bound=(">=", 1.5)).met is False
    assert report.Row("c", 1.4, "x").met is None


def test_ratio_takes_medians_and_the_smaller_n() -> None:
    over = report.median_row("over", [10.0, 20.0, 30.0], "ms")
    under = report.median_row("under", [40.0], "ms")
    row = report.ratio_row("over / under", over, under, bound=("<=", 0.4))
    assert (row.value, row.n, row.unit, row.met) == (0.5, 1, "x", False)


def test_percentile_is_a_sample() -> None:
    samples = [float(n) for n in range(100, 0, -1)]
    assert report.percentile(samples, 50) == 51.0
    assert report.percentile(samples, 99) == 100.0
    assert report.percentile([5.0], 99) == 5.0


def test_table_and_json_say_the_same() -> None:
    rows = [
        report.median_row("next turn", [1.0, 3.0], "ms"),
        report.Row("ratio", 0.9, "x", 2, ("<=", 0.8)),
    ]
    assert report.as_table(rows).splitlines()[2:] == [
        "| next turn | 2 ms | 2 |  |  |",
        "| ratio | 0.9 x | 2 | <= 0.8 x | **no** |",
    ]
    whole = json.loads(report.as_json({"turns": rows}))
    assert whole["figures"]["turns"][0]["samples"] == [1.0, 3.0]
    assert whole["figures"]["turns"][1]["met"] is False
    assert {"cpu", "cores", "python", "commit", "versions"} <= set(whole["environment"])
