"""A client that never reads: others are served in full, and it is aborted after a bound."""

from __future__ import annotations

import msgpack
import zmq

from sessionkv.client import Client
from sessionkv.config import LimitsConfig
from sessionkv.errors import SlowReader
from sessionkv.ipc import messages as m
from tests.builders.fake_engine import FakeEngine, deltas, done, short_endpoint

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
