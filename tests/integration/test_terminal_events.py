"""Every accepted request ends in exactly one terminal event, whatever fails under it."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from sessionkv import Client, LimitsConfig
from sessionkv.engine.messages import TurnFinished
from sessionkv.errors import EngineClosed, TurnFailed
from tests.builders.checksum import tokens
from tests.builders.doors import Hold, Later
from tests.builders.engine import (
    GREEDY,
    SocketEngine,
    engine_config,
    greedy,
    open_engine,
    oracle,
    socket_engine,
)
from tests.builders.fake_engine import short_endpoint
from tests.builders.wire_client import WireClient

ON_AND_ON = {"temperature": 0}
SHORT = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
LIMITS = LimitsConfig(missed_heartbeats=1000, verdict_timeout_s=0.2)


@contextlib.contextmanager
def served(**parts: Any) -> Iterator[SocketEngine]:
    with short_endpoint() as endpoint:
        folder = Path(endpoint.removeprefix("ipc://")).parent
        config = engine_config(blocks=16_384, limits=LIMITS)
        with socket_engine(folder, config, **parts) as engine:
            yield engine


def start_of_everything(wire: WireClient) -> list[int]:
    """A running turn, two in line, a generation, a keyed turn: their request ids."""
    for name in ("a", "b"):
        wire.call("open", ord(name), session=name)
    turn = {"session": "a", "tokens": [1], "sampling": ON_AND_ON}
    wire.send("turn", 1, **turn, stream=True)
    wire.receive()
    wire.send("turn", 2, **turn, when_busy="queue")
    wire.send("turn", 3, **turn, when_busy="queue", stream=True)
    wire.send("generate", 4, tokens=[2], sampling=ON_AND_ON, stream=True)
    wire.send("turn", 5, session="b", tokens=[3], sampling=ON_AND_ON, idempotency_key="k")
    wire.call("stats", 9)
    return [1, 2, 3, 4, 5]


def everything(wire: WireClient, ids: list[int]) -> list[dict[str, Any]]:
    """All terminal replies there will ever be, once each of ``ids`` has one."""
    ends: list[dict[str, Any]] = []
    while set(ids) - {reply["id"] for reply in ends}:
        reply = wire.receive()
        if reply["t"] not in ("delta", "restarted"):
            ends.append(reply)
    wire.socket.rcvtimeo = 200
    with contextlib.suppress(zmq.Again):
        while True:
            reply = wire.receive()
            assert reply["id"] not in ids, f"something after the end: {reply}"
    return [reply for reply in ends if reply["id"] in ids]


def test_the_step_loop_fails() -> None:
    hold = Hold()
    with served(gate=hold.gate, runner={"script": hold.script}) as engine:
        with WireClient(engine.endpoint) as wire:
            ids = start_of_everything(wire)

            def broken(now: float) -> None:
                raise ZeroDivisionError

            engine.parts.scheduler.schedule = broken
            ends = everything(wire, ids)
        assert Counter(reply["id"] for reply in ends) == Counter(ids)
        assert {reply["code"] for reply in ends} == {TurnFailed.code}
        assert all("ZeroDivisionError" in reply["message"] for reply in ends)
        hold.release()


@pytest.mark.parametrize("part", ["judge", "render"])
def test_the_text_of_one_turn_fails(part: str) -> None:
    with served() as engine, Client(engine.endpoint) as client:
        session, other = client.open("a"), client.open("b")
        session.turn("x", sampling=GREEDY)
        before = session.info()
        writer = engine.loop._front._writer
        right = getattr(writer, part)

        def wrong(*args: Any) -> Any:
            raise ZeroDivisionError

        setattr(writer, part, wrong)
        for _ in range(2):
            with pytest.raises(TurnFailed, match="ZeroDivisionError"):
                session.turn("y", sampling=GREEDY)
        setattr(writer, part, right)
        after = session.info()
        assert (after.node, after.running) == (before.node, False)
        assert session.turn("y", sampling=GREEDY).cache.miss.reason.value == "none"
        assert other.turn(tokens=[1], sampling=GREEDY).tokens == tuple(oracle([1]))
        client.flush()
        engine.parts.kv.check()
        assert engine.parts.kv.ledger().idle


def test_a_verdict_that_never_comes_ends_the_turn_uncommitted() -> None:
    with served() as engine, Client(engine.endpoint) as client:
        session = client.open("a")
        front = engine.loop._front
        right = front._on_turn

        def forgetful(turn: Any, message: Any) -> None:
            if not isinstance(message, TurnFinished):
                right(turn, message)

        front._on_turn = forgetful  # type: ignore[method-assign]
        with pytest.raises(TurnFailed, match="not ready in time"):
            session.turn(tokens=[1], sampling=GREEDY)
        front._on_turn = right  # type: ignore[method-assign]
        assert session.info().turns == 0
        assert list(session.turn(tokens=[1], sampling=GREEDY).tokens) == oracle([1])
        client.flush()
        assert engine.parts.kv.ledger().idle


def test_a_step_fails_and_only_its_turns() -> None:
    broken = {"now": False}
    runner = {"fail_step": lambda plan: broken["now"]}
    with served(runner=runner) as engine, Client(engine.endpoint) as client:
        session = client.open("a")
        first = session.turn(tokens=tokens(9), sampling=GREEDY)
        broken["now"] = True
        with pytest.raises(TurnFailed):
            session.turn(tokens=[1], sampling=GREEDY)
        broken["now"] = False
        log = [*tokens(9), *first.tokens, 1]
        assert list(session.turn(tokens=[1], sampling=GREEDY).tokens) == oracle(log)
        client.flush()
        assert engine.parts.kv.ledger().idle


def test_a_drain_lets_turns_end_and_refuses_new_ones() -> None:
    hold = Hold()
    with served(gate=hold.gate, runner={"script": hold.script}) as engine:
        with WireClient(engine.endpoint) as wire:
            ids = start_of_everything(wire)
            engine.host.drain()
            refused = [wire.call("turn", 20, session="b", tokens=[1], when_busy="queue"),
                       wire.call("generate", 21, tokens=[1]),
                       wire.call("open", 22, session="c")]  # fmt: skip
            hold.release()
            ends = everything(wire, ids)
        assert [reply["code"] for reply in refused] == [EngineClosed.code] * 3
        assert Counter(reply["id"] for reply in ends) == Counter(ids)
        assert {reply["t"] for reply in ends} == {"done"}


def test_a_drain_that_takes_too_long_ends_what_is_left() -> None:
    hold = Hold()
    config = engine_config(blocks=16_384, limits=LimitsConfig(drain_s=0.3, missed_heartbeats=1000))
    with short_endpoint() as endpoint:
        folder = Path(endpoint.removeprefix("ipc://")).parent
        runner = {"script": hold.script}
        with socket_engine(folder, config, gate=hold.gate, runner=runner) as engine:
            with WireClient(engine.endpoint) as wire:
                ids = start_of_everything(wire)
                engine.host.drain()
                ends = everything(wire, ids)
            assert Counter(reply["id"] for reply in ends) == Counter(ids)
            assert {reply["code"] for reply in ends} == {EngineClosed.code}
            hold.release()


def test_the_front_of_an_embedded_engine_fails(tmp_path: Path) -> None:
    hold = Hold()
    config = engine_config(tmp_path, blocks=16_384, limits=LimitsConfig(drain_s=0.5))
    with open_engine(config, gate=hold.gate, runner={"script": hold.script}) as engine:
        session = engine.open("a")
        running = Later(lambda: session.turn(tokens=[1], sampling=greedy(None)))
        hold.wait_going()
        front = engine._core._transport._front  # type: ignore[attr-defined]

        def broken(message: Any) -> None:
            raise ZeroDivisionError

        front._call_done = broken
        with pytest.raises(TurnFailed, match="ZeroDivisionError"):
            session.info()
        with pytest.raises(TurnFailed):
            session.turn("y")
        assert isinstance(running.error(), TurnFailed)
        hold.release()
    with open_engine(config) as engine:
        assert engine.session("a").info().turns == 0
