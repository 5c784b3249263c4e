"""An engine ends though its journal hangs, and says nothing of what that may store yet."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sessionkv import EngineConfig, LimitsConfig
from sessionkv.actor.serve import _result
from sessionkv.cli.serve import ending
from sessionkv.engine.messages import CoreStopped, DrainReport
from sessionkv.errors import ConnectionLost, EngineClosed, TurnFailed
from sessionkv.store.answers import DiskEvicted
from tests.builders.checksum import tokens
from tests.builders.doors import Later
from tests.builders.engine import GREEDY, engine_config, open_engine, socket_engine
from tests.builders.store import Gates


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """Of an engine that gives a hanging journal up soon."""
    monkeypatch.setattr("sessionkv.engine.draining.COMMIT_GRACE_S", 0.1)
    return replace(engine_config(tmp_path / "store"), limits=LimitsConfig(drain_s=0.2))


@contextmanager
def hanging(gates: Gates, parts: Any, asked: Any) -> Iterator[list[Later]]:
    """A turn and a fork that the journal is to store, and a turn whose key it is to look for."""
    for name in "abc":
        asked.open(name)
    asked.session("b").turn(tokens=tokens(5), sampling=GREEDY)
    gates.__init__("before_commit")  # shut from now on
    waiting = [Later(lambda: asked.session("a").turn(tokens=tokens(9), sampling=GREEDY))]
    try:
        assert gates.reached["before_commit"].wait(30)
        waiting.append(Later(lambda: asked.session("b").fork("d")))
        keyed = {"sampling": GREEDY, "idempotency_key": "k"}
        waiting.append(Later(lambda: asked.session("c").turn(tokens=tokens(9), **keyed)))
        until_waiting(parts.store._journal, 2)
        yield waiting
    finally:
        gates.open("before_commit")


def until_waiting(journal: Any, count: int) -> None:
    for _ in range(30_000):
        if len(journal._waiting) == count:
            return
        threading.Event().wait(0.001)
    raise AssertionError(f"{len(journal._waiting)} wait for the journal, not {count}")


def test_closing_an_engine_gives_up_a_journal_that_hangs_and_says_so(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    gates = Gates()
    with caplog.at_level(logging.ERROR), open_engine(config, gates=gates) as engine:
        store = engine.parts.store
        with hanging(gates, engine.parts, engine) as waiting:
            engine.close()
            for later in waiting:  # they may be stored still
                assert isinstance(later.error(), ConnectionLost)
            with pytest.raises(EngineClosed):
                engine.open("a")
            assert store._journal._thread.is_alive()
            assert store._journal._thread.daemon
        store._journal._thread.join()
        store._journal_store.close()
    assert f"the journal in {config.store} has not answered 2 commits" in caplog.text


def test_clients_hear_of_undecided_turns_by_the_connections_end(
    tmp_path: Path, config: EngineConfig
) -> None:
    gates = Gates()
    with (
        socket_engine(tmp_path, config, gates=gates) as served,
        served.client() as client,
        hanging(gates, served.parts, client) as (turn, fork, unbegun),
    ):
        served.host.drain()
        for undecided in (turn, fork):
            assert isinstance(undecided.error(), ConnectionLost)
        client.close()  # the keyed turn would wait for the engine to come back
        assert isinstance(unbegun.error(), EngineClosed)


def test_a_failed_core_does_not_answer_what_may_be_stored(config: EngineConfig) -> None:
    gates = Gates()
    with (
        open_engine(config, gates=gates) as engine,
        hanging(gates, engine.parts, engine) as (turn, fork, unbegun),
    ):
        engine._core._transport._host.inbox.put(DiskEvicted(None))  # ends the loop
        for undecided in (turn, fork):
            assert isinstance(undecided.error(), ConnectionLost)
        assert isinstance(unbegun.error(), TurnFailed)


@pytest.mark.parametrize(("unanswered", "code"), [(0, 0), (1, 1)])
def test_serve_exits_with_1_where_the_journal_was_given_up(unanswered: int, code: int) -> None:
    stopped = CoreStopped(drained=DrainReport(0, 0, 0, 2.0, unanswered))
    told: list[DrainReport] = []
    front: Any = SimpleNamespace(is_lost=False, stopped=stopped)
    assert _result(front, told.append) == code
    assert told == [stopped.drained]


def test_the_last_line_says_that_the_journal_was_given_up() -> None:
    assert ending(DrainReport(0, 0, 0, 2.0, 1)) == (
        "stopped after 2 s: the journal did not answer 1 change, which it may have stored or not"
    )
