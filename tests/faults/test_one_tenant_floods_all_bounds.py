"""A tenant that fills everything that is bounded meets its own bounds; another loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from sessionkv import Client
from sessionkv.config import LimitsConfig
from sessionkv.engine.grammar_desk import _Asked, _Waiting
from sessionkv.errors import Overloaded
from sessionkv.ipc import messages as wire
from sessionkv.types import SamplingParams
from tests.builders.checksum import tokens
from tests.builders.engine import (
    GREEDY,
    SocketEngine,
    StepGate,
    engine_config,
    greedy,
    oracle,
)
from tests.builders.tenants import access, tenants

LOG = tokens(24)
SESSIONS, KEYS_KEPT, QUEUE, UNNAMED = 8, 6, 4, 6


def refused(ask: Callable[[int], object], most: int) -> tuple[int, dict[str, Any]]:
    """How often something was granted, of ``most`` times at most, and the figures of its end."""
    for number in range(most):
        try:
            ask(number)
        except Overloaded as error:
            return number, dict(error.details)
    raise AssertionError("nothing was ever refused")


@dataclass
class Flooded:
    """Two tenants, of whom one has taken all it got.

    Attributes:
        granted: What the flood was granted of each kind, and the figures of its refusal.
        waited: Outcomes of turns that both had asked for while one ran: reply tokens, or figures.
    """

    engine: SocketEngine
    flood: Client
    victim: Client
    granted: dict[str, tuple[int, dict[str, Any]]]
    waited: dict[str, list[Any]]


@pytest.fixture(scope="module")
def flooded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flooded]:
    limits = LimitsConfig(sessions=SESSIONS, idempotency_keys=KEYS_KEPT)
    config = engine_config(blocks=48, limits=limits)
    config = replace(config, scheduler=replace(config.scheduler, max_queue=QUEUE, max_running=1))
    gates = [open_gate := StepGate()]
    open_gate.open()
    folder = tmp_path_factory.mktemp("e")
    with tenants(folder, config, access=access(), gate=lambda plan: gates[-1](plan)) as found:
        engine, flood, victim = found
        engine.parts.tree.max_unnamed = UNNAMED
        size = 16 * engine.parts.runner.geometry.block_bytes
        share = {"device_bytes": size}
        engine.host.renew_access(access(alice=share, bob=share))
        victim.open("v").turn(tokens=LOG, sampling=GREEDY, idempotency_key="mine")
        for name in ("~v0", "~v1"):
            victim.open(name)
        granted = {
            "unnamed": refused(lambda i: flood.open(f"~f{i:02}"), 99),
            "sessions": refused(lambda i: flood.open(f"f{i:02}"), 99),
        }
        for i in range(12):
            prompt = tokens(24, start=100 + 40 * i)
            flood.session(f"f{i % 4:02}").turn(tokens=prompt, sampling=greedy(2))
            flood.generate(tokens=prompt[:5], sampling=greedy(1), idempotency_key=f"k{i}")
            flood.count(prompt="word " * 50)
        gates.append(gate := StepGate())
        waited = {"flood": [ask_one(flood, 0)]}
        gate.reached()
        waited["flood"] += [ask_one(flood, i) for i in range(1, 13)]
        arrived(flood)
        waited["victim"] = [ask_one(victim, i) for i in range(3)]
        arrived(victim)
        gate.open()
        outcomes = {
            name: [outcome(client, turn) for turn in waited[name]]
            for name, client in (("flood", flood), ("victim", victim))
        }
        yield Flooded(engine, flood, victim, granted, outcomes)


def ask_one(client: Client, number: int) -> Any:
    prompt = tokens(9, start=20 * number)
    return client._core.submit(wire.Generate, {"tokens": prompt, "sampling": GREEDY})


def arrived(client: Client) -> None:
    """Core has been handed everything that a client asked before."""
    client._call(wire.Ping, {"consumed": client._core.consumed})


def outcome(client: Client, turn: Any) -> Any:
    try:
        return list(client._finish(turn, client._core.abandon).tokens)
    except Overloaded as error:
        return error.details["queued"]


def test_places_in_the_queue(flooded: Flooded) -> None:
    """One runs; of the rest as many wait as may, and the victim's share is free all the same."""
    mine, theirs = flooded.waited["victim"], flooded.waited["flood"]
    assert mine == [oracle(tokens(9)), oracle(tokens(9, start=20)), QUEUE // 2]
    assert theirs[: 1 + QUEUE] == [oracle(tokens(9, start=20 * i)) for i in range(1 + QUEUE)]
    assert theirs[1 + QUEUE :] == [QUEUE] * (12 - QUEUE)


def test_sessions(flooded: Flooded) -> None:
    granted, figures = flooded.granted["sessions"]
    assert granted == figures["sessions"] == SESSIONS - 1  # the victim's is one
    for i in range(SESSIONS // 2 - 1):
        flooded.victim.open(f"more{i}").close(keep=False)
    names = [info.name for info in flooded.victim.sessions()]
    assert names == ["v"]


def test_unnamed_sessions(flooded: Flooded) -> None:
    granted, figures = flooded.granted["unnamed"]
    assert granted == figures["sessions"] == 2 * UNNAMED - 2
    for _ in range(100_000):  # they are taken away beside other work
        if len(flooded.flood.sessions("~")) == UNNAMED - 2:
            break
    left = [info.name for info in flooded.flood.sessions("~")]
    assert left == [f"~f{i:02}" for i in range(granted - (UNNAMED - 2), granted)]
    assert [info.name for info in flooded.victim.sessions("~")] == ["~v0", "~v1"]


def test_idempotency_keys(flooded: Flooded) -> None:
    def again(client: Client, key: str, prompt: list[int]) -> bool:
        reply = client.generate(tokens=prompt, sampling=greedy(1), idempotency_key=key)
        return reply.replayed

    session = flooded.victim.session("v")
    turns = session.info().turns
    assert session.turn(tokens=LOG, sampling=GREEDY, idempotency_key="mine").replayed
    assert session.info().turns == turns
    assert again(flooded.flood, "k11", tokens(5, start=540))
    assert not again(flooded.flood, "k0", tokens(5, start=100))


def test_blocks(flooded: Flooded) -> None:
    reply = flooded.victim.session("v").turn(tokens=[9, 9], sampling=GREEDY)
    assert reply.cache.cached_tokens == len(LOG) + 7
    flooded.engine.parts.kv.check()


def test_grammars_that_wait_to_be_compiled() -> None:
    waiting = _Waiting()
    for number in range(4):
        waiting.add(_Asked(number, "flood", SamplingParams(), frozenset()))
    assert not waiting.has_room("flood", 4)
    for number in (4, 5):
        assert waiting.has_room("victim", 4)
        waiting.add(_Asked(number, "victim", SamplingParams(), frozenset()))
    assert not waiting.has_room("victim", 4)
    assert [waiting.take().tenant for _ in range(3)] == ["flood", "victim", "flood"]
