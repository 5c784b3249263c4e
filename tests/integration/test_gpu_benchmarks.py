"""The benchmarks of the engine on a device, with a tiny model on whatever device there is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.driver import Trace, decode_rate, gaps_ms
from benchmarks.gpu.models import SHAPES, add_text, write_model
from benchmarks.gpu.results import Results
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.stages import STAGES, run_stage
from benchmarks.report import Row
from sessionkv.model.prepare import prepare_model
from sessionkv.types import CacheReport


def setting(tmp_path: Path, **changes: float) -> Setting:
    return Setting("tiny", tmp_path / "work", tmp_path / "disk", device="cpu", **changes)


def trace(*times: float) -> Trace:
    cache = CacheReport(1, 0, 0, 0, 1)
    return Trace(0.0, tuple((at, 1) for at in times), (1,) * len(times), 0, cache)


def test_the_rate_counts_tokens_while_all_streams_decode() -> None:
    assert decode_rate([trace(1.0, 2.0, 3.0, 4.0), trace(2.0, 2.5, 3.0)]) == 3.0
    with pytest.raises(RuntimeError, match="never decoded all together"):
        decode_rate([trace(1.0, 2.0), trace(2.0, 3.0)])


def test_gaps_are_those_that_end_within_the_window() -> None:
    assert gaps_ms(trace(1.0, 2.0, 4.0, 5.0), 2.0, 4.5) == [1000.0, 2000.0]


def test_a_random_model_is_one_that_can_be_run(tmp_path: Path) -> None:
    model = write_model("tiny", tmp_path / "model")
    before = (model / "model.safetensors").stat().st_mtime_ns
    write_model("tiny", model)
    assert (model / "model.safetensors").stat().st_mtime_ns == before
    plain = prepare_model(str(model), cache_dir=tmp_path, offline=True)
    wordy = prepare_model(str(add_text(model, tmp_path / "t")), cache_dir=tmp_path, offline=True)
    assert plain.spec.num_layers == SHAPES["tiny"].layers
    assert plain.fingerprint == wordy.fingerprint
    assert plain.text_dir != wordy.text_dir


def test_cases_are_kept_resumed_and_fail_alone(tmp_path: Path) -> None:
    def broken() -> list[Row]:
        raise ValueError("broken")

    results = Results(tmp_path, setting(tmp_path), only=["b", "part"])
    assert results.pending("part", ["a", "b"]) == ["a", "b"]
    assert results.pending("other", ["a", "b"]) == ["b"]
    results.measure("part", "a", broken)
    results.measure("part", "b", lambda: [Row("figure", 1.5, "ms", bound=("<=", 2.0))])
    assert list(results.failed) == ["a"]
    again = Results(tmp_path, setting(tmp_path))
    assert again.pending("part", ["a", "b"]) == ["a"]
    assert again.rows() == results.rows()
    assert again.rows()["part"][0].met is True
    late = Results(tmp_path, setting(tmp_path, deadline_s=0.0), again=True)
    assert late.pending("part", ["a"]) == []
    assert late.left == ["a"]


def test_a_stage_runs_on_the_tiny_model(tmp_path: Path) -> None:
    told = setting(tmp_path)
    results = Results(tmp_path / "results", told, only=["first-token", "cold-32"])
    run_stage("resident", STAGES["resident"], told, results)
    assert results.failed == {}
    kept = json.loads((tmp_path / "results" / "resident.json").read_text())
    assert list(kept) == ["first-token", "cold-32"]
    assert {row["unit"] for case in kept.values() for row in case["rows"]} == {"ms"}
    assert "cold prompt of 32" in told.known
