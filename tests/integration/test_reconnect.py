"""Engines that die, come back, forget or fall silent, as clients see it over the socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from sessionkv.client import Client, StreamEvent, TurnResult
from sessionkv.config import LimitsConfig
from sessionkv.errors import ConnectionLost, ProtocolViolation, SessionKVError
from sessionkv.ipc import messages as m
from tests.builders.fake_engine import FakeEngine, deltas, done, short_endpoint

LIMITS = LimitsConfig(heartbeat_s=0.1)


@pytest.fixture
def endpoint() -> Iterator[str]:
    with short_endpoint() as endpoint:
        yield endpoint


def run_in_thread(call: object) -> tuple[threading.Thread, list[object]]:
    """Start a call; its result or error is in the list once the thread ended."""
    out: list[object] = []

    def run() -> None:
        try:
            out.append(call())
        except SessionKVError as error:
            out.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, out


def silent(request: m.Request) -> list[m.Reply]:
    return []


def test_a_turn_without_key_ends_with_connection_lost_and_is_never_sent_again(endpoint):
    with FakeEngine(endpoint, limits=LIMITS, answer=silent) as first:
        client = Client(endpoint)
        thread, out = run_in_thread(lambda: client.session("a").turn("x"))
        first.wait_for(m.Turn)
    with FakeEngine(endpoint, limits=LIMITS) as second:
        thread.join(20)
        (error,) = out
        assert isinstance(error, ConnectionLost)
        second.wait_for(m.Hello)
        assert client.session("a").turn("y").text == "y"
        assert [r.text for _, r in second.requests if isinstance(r, m.Turn)] == ["y"]
        client.close()


def test_a_keyed_turn_is_sent_again_to_the_next_engine_and_the_stream_restarts(endpoint):
    with FakeEngine(endpoint, limits=LIMITS, answer=silent) as first:
        client = Client(endpoint)
        stream = client.session("a").stream("x", idempotency_key="k")
        ((conn, turn),) = first.wait_for(m.Turn)
        for delta in deltas(turn.id, "ab"):
            first.send(conn, delta)
        events = [next(stream), next(stream)]

    def again(request: m.Request) -> list[m.Reply]:
        attempt = request.attempt + 1
        pieces = deltas(request.id, "xyz", attempt=attempt)
        return [m.Restarted(request.id, attempt=attempt), *pieces,
                done(request.id, "xyz", attempt=attempt)]  # fmt: skip

    with FakeEngine(endpoint, limits=LIMITS, answer=again) as second:
        events += list(stream)
        ((_, resent),) = second.wait_for(m.Turn)
        assert (resent.attempt, resent.idempotency_key) == (1, "k")
        client.close()
    assert [e.text for e in events] == ["a", "b", "", "x", "y", "z", ""]
    assert [e.restarted for e in events].index(True) == 2
    assert stream.result.text == "xyz"


def test_a_keyed_turn_attaches_to_its_run_when_only_the_connection_was_lost(endpoint):
    with FakeEngine(endpoint, limits=LIMITS, answer=silent) as engine:
        client = Client(endpoint)
        stream = client.session("a").stream("x", idempotency_key="k")
        ((conn, turn),) = engine.wait_for(m.Turn)
        engine.send(conn, deltas(turn.id, "ab")[0])
        events: list[StreamEvent] = [next(stream)]
        engine._outboxes.pop(conn)  # the engine forgets the connection, not the run
        ((_, _), (conn, again)) = engine.wait_for(m.Turn, 2)
        assert again.attempt == 1
        whole = m.Delta(again.id, attempt=1, tokens=list(b"abc"), text="abc")
        engine.send(conn, whole)
        engine.send(conn, done(again.id, "abcd"))
        events += list(stream)
        client.close()
    assert [e.text for e in events] == ["a", "bc", "d"]
    assert not any(e.restarted for e in events)


def test_a_keyed_turn_that_was_committed_is_replayed(endpoint):
    with FakeEngine(endpoint, limits=LIMITS, answer=silent) as first:
        client = Client(endpoint)
        turn = client.session("a").turn
        thread, out = run_in_thread(lambda: turn("x", idempotency_key="k"))
        first.wait_for(m.Turn)
    with FakeEngine(endpoint, limits=LIMITS, answer=lambda r: [done(r.id, "old", replayed=True)]):
        thread.join(20)
        client.close()
    (result,) = out
    assert isinstance(result, TurnResult)
    assert (result.text, result.replayed) == ("old", True)


def test_a_keyed_turn_waits_only_so_long(endpoint):
    with FakeEngine(endpoint, limits=LIMITS, answer=silent) as first:
        client = Client(endpoint, timeout_s=0.3)
        turn = client.session("a").turn
        thread, out = run_in_thread(lambda: turn("x", idempotency_key="k"))
        first.wait_for(m.Turn)
    thread.join(20)
    (error,) = out
    assert isinstance(error, ConnectionLost)
    assert "did not come back" in error.message
    client.close()


def test_an_engine_that_ended_is_noticed_without_any_silence(endpoint):
    never = LimitsConfig(heartbeat_s=1000.0)
    with FakeEngine(endpoint, limits=never, answer=silent) as engine:
        client = Client(endpoint)
        stream = client.session("a").stream("x")
        ((conn, turn),) = engine.wait_for(m.Turn)
        for delta in deltas(turn.id, "last words"):
            engine.send(conn, delta)
    heard: list[str] = []
    with pytest.raises(ConnectionLost, match="ended the connection"):
        heard.extend(event.text for event in stream)
    assert "".join(heard) == "last words"
    client.close()


def test_a_silent_engine_is_noticed(endpoint):
    with FakeEngine(endpoint, limits=LIMITS, answer=silent) as engine:
        client = Client(endpoint)
        thread, out = run_in_thread(lambda: client.session("a").turn("x"))
        engine.wait_for(m.Turn)
        engine.mute.set()
        thread.join(20)
        client.close()
    assert isinstance(out[0], ConnectionLost)
    assert "silent for 1.2 s" in out[0].message


def test_an_engine_that_forgot_the_connection_is_greeted_anew(endpoint):
    with FakeEngine(endpoint, limits=LIMITS) as engine, Client(endpoint) as client:
        client.stats()
        engine._outboxes.clear()
        engine.wait_for(m.Hello, 2)
        assert client.session("a").turn("x").text == "x"


def test_a_request_that_meets_a_forgetful_engine_is_connection_lost_not_the_users_fault(endpoint):
    with FakeEngine(endpoint) as engine, Client(endpoint) as client:
        client.stats()
        engine._outboxes.clear()
        with pytest.raises(ConnectionLost):
            client.session("a").turn("x")
        engine.wait_for(m.Hello, 2)


def test_an_engine_of_another_version_ends_the_client_with_its_words(endpoint):
    with FakeEngine(endpoint, limits=LIMITS) as engine:
        engine._replies = lambda conn, r: [
            m.Failure(r.id, code="protocol_violation", message="supported: 2")
        ]
        client = Client(endpoint)
        for _ in range(2):
            with pytest.raises(ProtocolViolation, match="supported: 2"):
                client.stats()
        client.close()


def test_heartbeats_carry_what_was_consumed(endpoint):
    with FakeEngine(endpoint, limits=LIMITS) as engine, Client(endpoint) as client:
        for _ in client.session("a").stream("abcde"):
            pass
        count = len([r for _, r in engine.requests if isinstance(r, m.Ping)])
        (_, ping) = engine.wait_for(m.Ping, count + 2)[-1]
        assert ping.consumed == 5


def test_requests_made_before_the_welcome_are_sent_after_it(endpoint):
    with FakeEngine(endpoint, limits=LIMITS) as engine, Client(endpoint) as client:
        assert client.session("a").turn("x").text == "x"
        kinds = [type(r) for _, r in engine.requests]
        assert kinds[:2] == [m.Hello, m.Turn]
