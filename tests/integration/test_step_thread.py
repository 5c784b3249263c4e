"""What the runner makes for the thread of the step loop is there before the engine is ready."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest

from sessionkv import Engine
from sessionkv.engine.build import build_engine
from sessionkv.errors import EngineStartFailed
from sessionkv.types import StepPlan
from tests.builders.checksum import tokens
from tests.builders.engine import engine_config, greedy


class NotingRunner:
    """Notes which of its methods is called on which thread, and fails where it is told to."""

    def __init__(self, runner: Any, *, fails: bool) -> None:
        self._runner, self._fails = runner, fails
        self.calls: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def _note(self, what: str) -> None:
        self.calls.append((what, threading.current_thread().name))

    def prepare_thread(self) -> None:
        self._note("prepare")
        if self._fails:
            raise RuntimeError("no plans")

    def launch(self, plan: StepPlan) -> Any:
        self._note("launch")
        return self._runner.launch(plan)


def noting_engine(made: list[NotingRunner], *, fails: bool = False) -> Engine:
    def wrap(runner: Any) -> Any:
        made.append(NotingRunner(runner, fails=fails))
        return made[-1]

    return Engine(engine_config(), build=partial(build_engine, wrap_runner=wrap))


def test_the_loops_thread_is_prepared_once_and_first() -> None:
    made: list[NotingRunner] = []
    with noting_engine(made) as engine:
        (runner,) = made
        assert runner.calls == [("prepare", "core")]
        engine.generate(tokens=tokens(5), sampling=greedy(2))
    assert runner.calls == [("prepare", "core"), ("launch", "core"), ("launch", "core")]


def test_an_engine_that_cannot_prepare_it_does_not_start() -> None:
    made: list[NotingRunner] = []
    with pytest.raises(EngineStartFailed, match="RuntimeError: no plans"):
        noting_engine(made, fails=True)
    assert made[0].calls == [("prepare", "core")]
