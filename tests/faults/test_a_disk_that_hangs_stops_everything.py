"""Fault: block transfers that are never answered are waited for, by whoever needs their room.

A disk that hangs costs time, once, and what is dropped is computed again; answers stay the same,
and the disk is used again as soon as it answers.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sessionkv.config import SchedulerConfig
from tests.builders.engine import CheckedEngine, engine_config, greedy, open_engine, oracle
from tests.builders.store import Gates

REPLY = greedy(4)
NAMES = [f"s{number}" for number in range(8)]


class HangingDisk(Gates):
    """A shut gate that counts only once the disk hangs."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.hangs = False

    def pass_through(self, name: str) -> None:
        if self.hangs:
            super().pass_through(name)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody will answer is found out soon."""
    monkeypatch.setattr("sessionkv.cache.silence.SILENCE_S", 0.05)
    monkeypatch.setattr("sessionkv.engine.scheduler.transfers.LATE_S", 0.1)
    monkeypatch.setattr("sessionkv.engine.scheduler.transfers.LATE_FACTOR", 0)


def turns(engine: CheckedEngine, logs: dict[str, list[int]]) -> None:
    for name in NAMES:
        log = logs.setdefault(name, [])
        new = [(len(log) + 7 * i + int(name[1:])) % 200 for i in range(10)]
        prompt = [*log, *new]
        reply = engine.open(name).turn(tokens=new, sampling=REPLY)
        assert list(reply.tokens) == oracle(prompt, REPLY)
        logs[name] = [*prompt, *reply.tokens]


def wait_until_said(caplog: pytest.LogCaptureFixture, beginning: str) -> None:
    """Core says it at its next look at the clock."""
    deadline = time.monotonic() + 20.0
    while not any(record.getMessage().startswith(beginning) for record in caplog.records):
        assert time.monotonic() < deadline, f"nobody said: {beginning}"
        time.sleep(0.01)


@pytest.mark.parametrize("host_blocks", [0, 12])
@pytest.mark.parametrize(
    "gate", ["disk_put_half", "before_index_commit", "before_lookup", "before_read"]
)
def test_turns_go_on_beside_a_disk_that_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gate: str, host_blocks: int
) -> None:
    caplog.set_level(logging.WARNING)
    disk, logs = HangingDisk(gate), dict[str, list[int]]()
    config = engine_config(tmp_path / "store", blocks=48, host_blocks=host_blocks, disk_bytes=2**22)
    config = replace(config, scheduler=SchedulerConfig())
    with open_engine(config, gates=disk) as engine:
        turns(engine, logs)
        disk.hangs = True
        for _ in range(2):
            turns(engine, logs)
        assert disk.reached[gate].is_set()
        stats = engine.stats()
        assert "writes to disk" in stats["store"]["unanswered"]
        assert stats["ledger"]["lost_blocks"] > 0
        wait_until_said(caplog, "writes to disk are not answered")
        disk.hangs = False
        disk.open(gate)
        engine.assert_ledger()
        assert engine.stats()["store"]["unanswered"] == []
        turns(engine, logs)
        engine.assert_ledger()
        said = [record.getMessage() for record in caplog.records]
    # A slow answer may count as none here, as nothing is waited for long: each time is said once.
    for what in ("writes to disk", "reads from disk"):
        about = [line for line in said if line.startswith(what)]
        assert ["again" in line for line in about] == [i % 2 == 1 for i in range(len(about))]
    assert any(line.startswith("writes to disk are not answered") for line in said)
    with open_engine(config) as engine:
        turns(engine, logs)
