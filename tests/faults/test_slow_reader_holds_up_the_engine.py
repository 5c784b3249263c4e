"""A client that never reads: others are served in full, and it is aborted after a bound."""

from __future__ import annotations

from pathlib import Path

import msgpack
import zmq

from sessionkv.client import Client
from sessionkv.config import LimitsConfig
from sessionkv.errors import SlowReader
from sessionkv.ipc import messages as m
from tests.builders.engine import engine_config, greedy, oracle, socket_engine
from tests.builders.fake_engine import FakeEngine, deltas, done, short_endpoint
from tests.builders.wire_client import WireClient

LONG = "t" * 5000


def test_a_client_that_never_reads_is_aborted_and_the_other_loses_nothing():
    limits = LimitsConfig(unread_events=100, unread_timeout_s=0.3)

    def answer(request: m.Request) -> list[m.Reply]:
        pieces = deltas(request.id, LONG)
        return pieces if request.session == "idle" else [*pieces, done(request.id, LONG)]

    context = zmq.Context()
    idle = context.socket(zmq.DEALER)
    idle.linger = 0
    idle.rcvhwm = 10
    with (
        short_endpoint() as endpoint,
        FakeEngine(endpoint, limits=limits, answer=answer, send_hwm=10) as engine,
        Client(endpoint) as client,
    ):
        idle.connect(endpoint)
        idle.send(msgpack.packb({"v": 1, "t": "hello", "id": 0}))
        idle.send(
            msgpack.packb(
                {"v": 1, "t": "turn", "id": 1, "session": "idle", "text": "x", "stream": True}
            )
        )
        engine.wait_for(m.Turn)
        events = list(client.session("busy").stream("x"))
        assert "".join(e.text for e in events) == LONG
        assert [t for e in events for t in e.tokens] == [ord(c) for c in LONG]
        idle.rcvtimeo = 20_000
        while (reply := msgpack.unpackb(idle.recv()))["t"] in ("welcome", "delta"):
            pass
        assert (reply["t"], reply["id"], reply["code"]) == ("error", 1, SlowReader.code)
    idle.close()
    context.term()


def test_a_reader_that_stops_and_goes_on_gets_every_token():
    limits = LimitsConfig(unread_events=100)
    with (
        short_endpoint() as endpoint,
        FakeEngine(endpoint, limits=limits, answer=lambda r: []) as engine,
        Client(endpoint) as client,
    ):
        stream = client.session("a").stream("x")
        ((conn, turn),) = engine.wait_for(m.Turn)
        for delta in deltas(turn.id, LONG):
            engine.send(conn, delta)
        events = [next(stream) for _ in range(50)]
        client.stats()
        engine.send(conn, done(turn.id, LONG))
        events += list(stream)
    assert [t for e in events for t in e.tokens] == [ord(c) for c in LONG]
    assert len(events) < len(LONG)


def test_a_client_that_is_gone_does_not_stop_the_others():
    with (
        short_endpoint() as endpoint,
        FakeEngine(endpoint, answer=lambda r: [] if r.text == "x" else [done(r.id)]) as engine,
        Client(endpoint) as client,
    ):
        gone = Client(endpoint)
        stream = gone.session("a").stream("x")
        ((conn, turn),) = engine.wait_for(m.Turn)
        gone.close()
        engine.wait_for(m.Bye)
        for delta in deltas(turn.id, LONG):
            engine.send(conn, delta)
        assert client.session("b").turn("y").text == "ok"
        stream.close()


SMALL = LimitsConfig(
    unread_events=20, unread_timeout_s=3.0, heartbeat_s=0.2, missed_heartbeats=1000
)


def served(limits: LimitsConfig, endpoint: str, **parts):
    config = engine_config(blocks=8192, limits=limits)
    return socket_engine(Path(endpoint.removeprefix("ipc://")).parent, config, **parts)


def test_an_engine_aborts_a_client_that_reads_nothing_and_frees_its_blocks():
    with (
        short_endpoint() as endpoint,
        served(SMALL, endpoint) as engine,
        Client(engine.endpoint) as client,
        WireClient(engine.endpoint) as idle,
    ):
        idle.call("open", 1, session="idle")
        sampling = {"temperature": 0, "ignore_eos": True}
        idle.send("turn", 2, session="idle", tokens=[1], stream=True, sampling=sampling)
        whole = client.open("busy").stream(tokens=[2], sampling=greedy(3000))
        assert [t for event in whole for t in event.tokens] == oracle([2], greedy(3000))
        while client.session("idle").info().running:
            pass
        assert client.session("idle").info().turns == 0
        *deltas, failure = idle.until(2)
        assert failure["code"] == SlowReader.code
        assert len(deltas) == SMALL.unread_events
        told = [t for delta in deltas for t in delta["tokens"]]
        assert told == oracle([1], greedy(len(told)))
        # What it was sent is still unread, so the next turn's events are kept at once.
        idle.send("ping", 3, consumed=len(deltas))
        again = idle.call("turn", 4, session="idle", tokens=[1],
                          sampling={**sampling, "max_tokens": 8})  # fmt: skip
        assert again["tokens"] == oracle([1], greedy(8))
        client.flush()
        assert engine.parts.kv.ledger().idle


def test_an_engine_makes_a_slow_readers_stream_coarser_and_loses_nothing():
    with (
        short_endpoint() as endpoint,
        served(SMALL, endpoint) as engine,
        WireClient(engine.endpoint) as slow,
    ):
        sampling = {"temperature": 0, "ignore_eos": True, "max_tokens": 400, "logprobs": 0}
        slow.send("generate", 1, tokens=[1], stream=True, sampling=sampling)
        deltas, offset = [], 0
        while (reply := slow.receive())["t"] != "done":
            if reply["t"] != "delta":
                continue
            assert reply["offset"] == offset
            assert len(reply["logprobs"]) == len(reply["tokens"])
            offset += len(reply["tokens"])
            deltas.append(reply)
            if len(deltas) % 10 == 0:
                slow.send("ping", 2 + len(deltas), consumed=len(deltas))
        told = [t for delta in deltas for t in delta["tokens"]]
        assert told == reply["tokens"] == oracle([1], greedy(400))
        assert len(deltas) < 400


def test_an_engine_gives_up_a_client_that_asks_and_never_reads():
    limits = LimitsConfig(unread_events=50, missed_heartbeats=1000)
    with (
        short_endpoint() as endpoint,
        served(limits, endpoint) as engine,
        Client(engine.endpoint) as client,
        WireClient(engine.endpoint, rcvhwm=1) as flood,
    ):
        # Far more answers than the sockets hold; one that is known no more gets one short answer.
        for i in range(6_000):
            flood.send("stats", i)
        while len(engine.loop._peers) > 1:
            assert client.stats()["ledger"]
        assert client.open("a").turn(tokens=[1], sampling=greedy(8)).tokens == tuple(
            oracle([1], greedy(8))
        )
