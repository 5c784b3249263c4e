"""The stages, in the order in which they matter; each has its engines to itself.

Cases that can share an engine are one stage, since starting one takes tens of seconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.gpu.block_sizes import SIZES, block_size_rows
from benchmarks.gpu.check import states_check
from benchmarks.gpu.conversations import pressure, requests_at_once
from benchmarks.gpu.engine import Bench, running
from benchmarks.gpu.machine import ceilings
from benchmarks.gpu.parity import parity
from benchmarks.gpu.resident import Case, decode_cases, first_token, resident_cases
from benchmarks.gpu.restart import after_kill
from benchmarks.gpu.results import Results
from benchmarks.gpu.setting import Setting, in_child
from benchmarks.gpu.tiers import host_cases, while_fetching, while_writing
from benchmarks.report import Options, Row, ratio_row
from sessionkv.config import CacheConfig

KERNELS = ("attention", "pointwise", "movers")


@dataclass(frozen=True, slots=True)
class Stage:
    """Some cases.

    Attributes:
        cases: Their names for a setting.
        run: Measures those named, each through ``Results.measure``.
    """

    about: str
    cases: Callable[[Setting], Sequence[str]]
    run: Callable[[Setting, Results, Sequence[str]], None]


def run_stage(name: str, stage: Stage, setting: Setting, results: Results) -> None:
    """Measure what of a stage is to be measured."""
    pending = results.pending(name, stage.cases(setting))
    if pending:
        print(f"\n## {name}: {stage.about}", flush=True)
        with results.guarded(name):
            stage.run(setting, results, pending)


def measure_on(
    start: Callable[[], AbstractContextManager[Bench]],
    results: Results,
    stage: str,
    cases: Mapping[str, Case],
    pending: Sequence[str],
) -> None:
    """Measure cases on one engine, or on another one from where a case has broken it."""
    left = list(pending)
    while left:
        with start() as bench:
            works = True
            while left and works:
                name = left.pop(0)
                results.measure(stage, name, partial(cases[name], bench))
                works = name not in results.failed or bench.works


# -- without the main model's engine --------------------------------------------------------------


def _alone(stage: str, cases: Mapping[str, Callable[[Setting], list[Row]]]) -> Stage:
    """Cases that start what they need themselves."""

    def run(setting: Setting, results: Results, pending: Sequence[str]) -> None:
        for name in pending:
            results.measure(stage, name, partial(cases[name], setting))

    return Stage(ABOUT[stage], partial(_on_gpu if stage in GPU_ONLY else _on_any, cases), run)


def _on_any(cases: Mapping[str, object], setting: Setting) -> Sequence[str]:
    del setting
    return list(cases)


def _on_gpu(cases: Mapping[str, object], setting: Setting) -> Sequence[str]:
    """What has no smaller form is left out where only the benchmark is tried."""
    return [] if setting.model == "tiny" else list(cases)


def _ceilings(setting: Setting) -> list[Row]:
    return in_child(ceilings, setting.disk)


def _kernels(setting: Setting, *, name: str) -> list[Row]:
    return in_child(measure_kernels, name, setting.disk)


def measure_kernels(name: str, disk: Path) -> list[Row]:
    """One of the benchmarks of kernels. Loads torch."""
    module = importlib.import_module(f"benchmarks.gpu.{name}")
    more = {"folder": str(disk)} if name == "movers" else {}
    rows: list[Row] = module.measure(Options(), **more)
    return [replace(row, name=f"{name}: {row.name}") for row in rows]


def _gaps(setting: Setting) -> list[Row]:
    return in_child(measure_gaps, setting.model_folder(setting.model), setting.disk)


def measure_gaps(folder: Path, disk: Path) -> list[Row]:
    """Traces of one engine's core. Loads torch."""
    rows: list[Row] = importlib.import_module("benchmarks.gpu.gaps").measure(folder, disk)
    return rows


# -- on engines of the main model -----------------------------------------------------------------


def _resident(setting: Setting, results: Results, pending: Sequence[str]) -> None:
    cases = resident_cases(setting.scale) | {"start": started}
    start = partial(running, setting, setting.model, host_bytes=0, disk_bytes=0)
    measure_on(start, results, "resident", cases, pending)


def started(bench: Bench) -> list[Row]:
    """How long the engine took to be ready."""
    return [Row(f"start of an engine, {bench.name}", bench.start_s, "s")]


def _tier_cases(setting: Setting) -> dict[str, Case]:
    """The last one ends the engine."""
    return {
        **host_cases(setting.scale),
        "pressure": pressure,
        "others-while-fetching": while_fetching,
        "others-while-writing": while_writing,
        "restart": partial(after_kill, store=setting.disk / "tiers"),
    }


def _tiers(setting: Setting, results: Results, pending: Sequence[str]) -> None:
    scale = setting.scale
    start = partial(
        running,
        setting,
        setting.model,
        store=setting.disk / "tiers",
        device_blocks=scale.pool // CacheConfig().block_size,
        host_bytes=scale.host_bytes,
        disk_bytes=scale.disk_bytes,
        durability="off",  # the disk is written when that is what is measured
    )
    measure_on(start, results, "tiers", _tier_cases(setting), pending)


def _requests(setting: Setting, results: Results, pending: Sequence[str]) -> None:
    start = partial(running, setting, setting.small, max_model_len=4096, host_bytes=0, disk_bytes=0)
    measure_on(start, results, "requests", REQUEST_CASES, pending)


def _text(setting: Setting, results: Results, pending: Sequence[str]) -> None:
    cases = {name: partial(with_text, case=case) for name, case in _text_cases(setting).items()}
    start = partial(running, setting, setting.model, text=True, host_bytes=0, disk_bytes=0)
    measure_on(start, results, "text", cases, pending)


def _text_cases(setting: Setting) -> dict[str, Case]:
    cases = decode_cases(setting.scale) | {"first-token": first_token}
    return {f"{name}-text": case for name, case in cases.items()}


def with_text(bench: Bench, *, case: Case) -> list[Row]:
    """A case's rows where every token has a text, and what that costs."""
    rows = []
    for row in case(bench):
        rows.append(replace(row, name=f"{row.name}, with text", bound=None))
        plain = bench.setting.known.get(row.name)
        if plain is not None and not row.name.startswith("prompts"):
            bar = bench.bar(">=", 0.97) if row.unit == "tok/s" else bench.bar("<=", 1.03)
            rows.append(ratio_row(f"{row.name}, with text / ids", rows[-1], plain, bound=bar))
    return rows


REQUEST_CASES: dict[str, Case] = {
    f"requests-{name.replace(' ', '-')}": partial(requests_at_once, shift=shift, name=name)
    for shift, name in enumerate(("first", "other tokens", "other tokens again"))
}
GPU_ONLY = ("machine", "kernels", "gaps")
ABOUT = {
    "check": "the same turn with its history on the device, in host memory and on disk",
    "machine": "what the machine can do",
    "resident": "everything on the device: decoding, first tokens, prompts, next turns",
    "tiers": "a device for a part: host memory, others meanwhile, pressure, disk after kill -9",
    "gaps": "the device's idle time while core decodes",
    "requests": "many requests at once",
    "parity": "log-probabilities against transformers'",
    "text": "decoding where every token has a text",
    "kernels": "kernels and moves by themselves",
    "blocks": "block sizes",
}
STAGES: dict[str, Stage] = {
    "check": _alone("check", {"states": states_check}),
    "machine": _alone("machine", {"ceilings": _ceilings}),
    "resident": Stage(
        ABOUT["resident"], lambda told: [*resident_cases(told.scale), "start"], _resident
    ),
    "tiers": Stage(ABOUT["tiers"], lambda told: list(_tier_cases(told)), _tiers),
    "gaps": _alone("gaps", {"trace": _gaps}),
    "requests": Stage(ABOUT["requests"], partial(_on_any, REQUEST_CASES), _requests),
    "parity": _alone("parity", {"transformers": parity}),
    "text": Stage(ABOUT["text"], lambda told: list(_text_cases(told)), _text),
    "kernels": _alone("kernels", {name: partial(_kernels, name=name) for name in KERNELS}),
    "blocks": _alone(
        "blocks", {f"blocks-{size}": partial(block_size_rows, size=size) for size in SIZES}
    ),
}
