"""Pictures of the GPU's figures are drawn from the files that a run leaves."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.gpu import plots
from benchmarks.report import Row, median_row

ROWS = [
    median_row("first token", [9.0, 8.0, 8.5, 8.2, 30.0], "ms", bound=("<=", 17.0)),
    Row("decode", 90.0, "tok/s", bound=(">=", 100.0)),
    Row("start", 11.0, "s"),
]


def results(folder: Path) -> Path:
    case = {"commit": "c", "date": "d", "seconds": 1, "rows": [asdict(row) for row in ROWS]}
    folder.mkdir()
    (folder / "resident.json").write_text(json.dumps({"all": case}))
    return folder


def test_a_bound_is_drawn_by_how_much_better_than_it_the_figure_is(tmp_path: Path) -> None:
    found = plots.margins(plots.load(results(tmp_path / "8b")))
    assert [(margin.label.splitlines()[0], margin.ratio) for margin in found] == [
        ("decode", 0.9),
        ("first token", 2.0),
    ]


def test_pictures_are_written_beside_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = results(tmp_path / "8b")
    monkeypatch.setattr(sys, "argv", ["plots", str(folder)])
    plots.main()
    for name in ("bounds", "times"):
        assert (folder / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_without_results_it_says_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["plots", str(tmp_path)])
    with pytest.raises(SystemExit):
        plots.main()
    assert "run benchmarks/gpu/run.sh first" in capsys.readouterr().err
