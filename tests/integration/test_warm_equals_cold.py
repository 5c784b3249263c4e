"""Wherever a history was meanwhile, the next turn answers as if there were no cache.

Checksums, so equal is equal. Each way has one report, known to the token. Prompts are 13 tokens and
replies 8: of the 21 tokens of a log 20 have KV, which are 5 blocks of 4 and no tail, or 22 of 23
with one of 2.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sessionkv import CacheReport, Client, EngineConfig, MissReason, launch
from sessionkv.client.results import TurnResult
from tests.builders.checksum import tokens
from tests.builders.engine import (
    GREEDY,
    CheckedEngine,
    StepGate,
    engine_config,
    greedy,
    open_engine,
    oracle,
)

DISK = 50_000_000
PROMPT = tokens(13)
LONGER = tokens(15)
DELTAS = ([7], [7, 8, 9, 10, 11])


def first_turn(client: Client, prompt: list[int], name: str = "a") -> list[int]:
    """The log of a session with one turn."""
    result = client.open(name).turn(tokens=prompt, sampling=GREEDY)
    assert list(result.tokens) == oracle(prompt)
    return prompt + list(result.tokens)


def assert_warm(
    result: TurnResult, log: list[int], delta: list[int], *, sampling: object = GREEDY, **tiers: int
) -> None:
    """The answer is the cold one, and every token of the log that had KV came from ``tiers``."""
    prompt = [*log, *delta]
    assert list(result.tokens) == oracle(prompt, sampling)
    report = result.cache
    assert report.prompt_tokens == result.usage.prompt_tokens == len(prompt)
    assert tiers_of(report) == tiers
    assert sum(tiers.values()) >= len(log) - 1  # the last token of a log has no KV yet
    assert report.computed_tokens == len(prompt) - sum(tiers.values())
    assert (report.miss.reason, report.miss.token) == (MissReason.NONE, None)
    assert report.miss_tokens == {}


def tiers_of(report: CacheReport) -> dict[str, int]:
    found = {
        "device": report.device_tokens,
        "host": report.host_tokens,
        "disk": report.disk_tokens,
    }
    return {tier: count for tier, count in found.items() if count}


def push_out(client: Client, num_blocks: int) -> None:
    """Fill the device with something else."""
    client.generate(tokens=tokens(4 * num_blocks - 1, start=500), sampling=greedy(2))


@pytest.fixture(params=[PROMPT, LONGER], ids=["no tail", "tail"])
def prompt(request: pytest.FixtureRequest) -> list[int]:
    prompt: list[int] = request.param
    return prompt


@pytest.fixture(params=DELTAS, ids=["one token", "five tokens"])
def delta(request: pytest.FixtureRequest) -> list[int]:
    delta: list[int] = request.param
    return delta


def test_on_the_device(prompt: list[int], delta: list[int]) -> None:
    with open_engine() as engine:
        log = first_turn(engine, prompt)
        result = engine.session("a").turn(tokens=delta, sampling=GREEDY)
        assert_warm(result, log, delta, device=len(log) - 1)
        engine.assert_ledger()


def test_in_host_memory(prompt: list[int], delta: list[int]) -> None:
    with open_engine(engine_config(blocks=12, host_blocks=20)) as engine:
        log = first_turn(engine, prompt)
        push_out(engine, 12)
        result = engine.session("a").turn(tokens=delta, sampling=GREEDY)
        assert_warm(result, log, delta, host=len(log) - 1)
        engine.assert_ledger()


def test_half_on_the_device_and_half_in_host_memory() -> None:
    with open_engine(engine_config(blocks=12, host_blocks=20)) as engine:
        log = first_turn(engine, PROMPT)
        push_out(engine, 9)  # 7 blocks are free, and 2 are taken from the end of the chain
        result = engine.session("a").turn(tokens=[7], sampling=greedy(2))
        assert_warm(result, log, [7], sampling=greedy(2), device=12, host=8)
        engine.assert_ledger()


def test_on_disk_without_a_host_tier(tmp_path: Path, prompt: list[int], delta: list[int]) -> None:
    with open_engine(engine_config(tmp_path, blocks=12, disk_bytes=DISK)) as engine:
        log = first_turn(engine, prompt)
        push_out(engine, 12)
        result = engine.session("a").turn(tokens=delta, sampling=GREEDY)
        assert_warm(result, log, delta, disk=len(log) - 1)
        engine.assert_ledger()


def test_on_disk_behind_a_host_tier(tmp_path: Path, prompt: list[int], delta: list[int]) -> None:
    config = engine_config(tmp_path, blocks=12, host_blocks=4, disk_bytes=DISK)
    with open_engine(config) as engine:
        log = first_turn(engine, prompt)
        for i in range(4):  # sessions, like it: what nobody retains would not displace it
            first_turn(engine, tokens(30, start=500 + 50 * i), f"more {i}")
        result = engine.session("a").turn(tokens=delta, sampling=GREEDY)
        assert_warm(result, log, delta, disk=len(log) - 1)
        engine.assert_ledger()


def test_forked(prompt: list[int], delta: list[int]) -> None:
    with open_engine() as engine:
        log = first_turn(engine, prompt)
        engine.session("a").fork("b")
        result = engine.session("b").turn(tokens=[98, *delta], sampling=GREEDY)
        assert_warm(result, log, [98, *delta], device=len(log) - 1)
        # The other one meets a tail that has grown, by the log's last token among others.
        result = engine.session("a").turn(tokens=[97, *delta], sampling=GREEDY)
        assert_warm(result, log, [97, *delta], device=len(log))
        engine.assert_ledger()


def test_rewound(prompt: list[int], delta: list[int]) -> None:
    with open_engine() as engine:
        log = first_turn(engine, prompt)
        session = engine.session("a")
        for last in (50, 51, 50):
            result = session.turn(tokens=[*delta, last], sampling=GREEDY)
            assert list(result.tokens) == oracle([*log, *delta, last])
            assert result.cache.cached_tokens >= len(log) - 1
            assert result.cache.miss.reason is MissReason.NONE
            session.rewind()
        # What differs is computed, what was asked before is there: all but its last token.
        assert result.cache.computed_tokens == 1
        engine.assert_ledger()


@pytest.mark.parametrize("host_blocks", [0, 30], ids=["recomputed", "fetched again"])
def test_preempted(host_blocks: int) -> None:
    gate = StepGate()
    config = engine_config(blocks=16, host_blocks=host_blocks)
    with open_engine(config, gate=lambda plan: gate(plan)) as engine:
        gate.open()
        logs = {
            name: first_turn(engine, tokens(9, start=n), name) for name, n in (("a", 0), ("b", 50))
        }
        gate = StepGate()
        sampling = greedy(24)
        turns = Together()
        turns.start(lambda: engine.session("a").turn(tokens=[7], sampling=sampling))
        gate.reached()
        turns.start(lambda: engine.session("b").turn(tokens=[8], sampling=sampling))
        queued(engine, 1)
        gate.open()
        results = turns.join()
        # 17 tokens of log, 1 new and 23 with KV each: 11 blocks, of 16.
        assert engine.stats()["preemptions"] >= 1
        assert_warm(results[0], logs["a"], [7], sampling=sampling, device=16)
        assert_warm(results[1], logs["b"], [8], sampling=sampling, device=16)
        assert results[0].cache.recomputed_tokens == 0
        again = results[1].cache.recomputed_tokens
        assert (again > 0) == (host_blocks == 0)
        engine.assert_ledger()


class Together:
    """Turns on threads of their own."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._results: dict[int, TurnResult] = {}

    def start(self, turn: Callable[[], TurnResult]) -> None:
        number = len(self._threads)
        thread = threading.Thread(target=lambda: self._results.update({number: turn()}))
        thread.start()
        self._threads.append(thread)

    def join(self) -> list[TurnResult]:
        for thread in self._threads:
            thread.join()
        return [self._results[number] for number in range(len(self._threads))]


def queued(engine: CheckedEngine, count: int) -> None:
    """Wait until so many messages for the core are in its inbox while it stands at a gate."""
    inbox = engine.building.built.inbox
    while len(inbox._items) < count:
        threading.Event().wait(0.001)


def restarted_config(store: Path) -> EngineConfig:
    return engine_config(store, disk_bytes=DISK)


def test_restarted(tmp_path: Path, prompt: list[int], delta: list[int]) -> None:
    with open_engine(restarted_config(tmp_path)) as engine:
        log = first_turn(engine, prompt)
    with open_engine(restarted_config(tmp_path)) as engine:
        result = engine.session("a").turn(tokens=delta, sampling=GREEDY)
        assert_warm(result, log, delta, disk=len(log) - 1)
        engine.assert_ledger()


def test_killed_and_restarted(tmp_path: Path) -> None:
    config = restarted_config(tmp_path)
    with launch("checksum", config=config) as process:
        client = process.client()
        log = first_turn(client, LONGER)
        client.flush()
        unflushed = first_turn(client, PROMPT, "b")
        process.kill()
    with launch("checksum", config=config) as process:
        client = process.client()
        result = client.session("a").turn(tokens=[7], sampling=GREEDY)
        assert_warm(result, log, [7], disk=len(log) - 1)
        # This one may have lost its blocks, but not a token of its log.
        result = client.session("b").turn(tokens=[7], sampling=GREEDY)
        assert list(result.tokens) == oracle([*unflushed, 7])
        report = result.cache
        assert report.cached_tokens + report.computed_tokens == len(unflushed) + 1
        if report.cached_tokens < len(unflushed) - 1:
            # Where its blocks were stored, loading them may take a busy disk longer than computing.
            known = (MissReason.NOT_STORED, MissReason.RECOMPUTE_WAS_SOONER)
            assert report.miss.reason in known
            assert report.miss.token == report.cached_tokens
