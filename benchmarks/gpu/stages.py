"""The stages, in the order in which they matter; each has its engines to itself.

Cases that can share an engine are one stage, since starting one takes tens of seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.gpu.engine import Bench, Setting, running
from benchmarks.gpu.resident import Case, decode_cases, first_token, resident_cases
from benchmarks.gpu.results import Results
from benchmarks.report import Row, ratio_row


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


# -- everything on the device ---------------------------------------------------------------------


def _resident(setting: Setting, results: Results, pending: Sequence[str]) -> None:
    cases = resident_cases(setting.scale) | {"start": started}
    start = partial(running, setting, setting.model, host_bytes=0, disk_bytes=0)
    measure_on(start, results, "resident", cases, pending)


def started(bench: Bench) -> list[Row]:
    """How long the engine took to be ready."""
    return [Row(f"start of an engine, {bench.name}", bench.start_s, "s")]


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
        if plain is not None:
            bar = bench.bar(">=", 0.97) if row.unit == "tok/s" else bench.bar("<=", 1.03)
            rows.append(ratio_row(f"{row.name}, with text / ids", rows[-1], plain, bound=bar))
    return rows


STAGES: dict[str, Stage] = {
    "resident": Stage(
        "everything on the device: decoding, first tokens, prompts, next turns",
        lambda setting: [*resident_cases(setting.scale), "start"],
        _resident,
    ),
    "text": Stage(
        "decoding where every token has a text",
        lambda setting: list(_text_cases(setting)),
        _text,
    ),
}
