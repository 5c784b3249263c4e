from __future__ import annotations

import pytest

from sessionkv.client.core import REPORT_EVERY, ClientCore
from sessionkv.client.pending import MAX_QUEUED, Pending
from sessionkv.errors import (
    ConnectionLost,
    EngineClosed,
    InvalidRequest,
    TurnCancelled,
)
from sessionkv.ipc import messages as m
from tests.builders.fake_engine import deltas, done
from tests.builders.fake_transport import FakeTransport

LOST = ConnectionLost("gone")


@pytest.fixture
def transport() -> FakeTransport:
    return FakeTransport()


@pytest.fixture
def core(transport: FakeTransport) -> ClientCore:
    return ClientCore(transport)


def turn(core: ClientCore, **fields: object) -> Pending:
    return core.submit(m.Turn, {"session": "a", "text": "x", "stream": True, **fields})


def events(pending: Pending) -> list[object]:
    found = []
    while (item := pending.pop()) is not None:
        found.append(item[0])
    return found


def test_ids_are_new_and_replies_go_where_they_belong(core, transport):
    first, second = turn(core), turn(core)
    assert [r.id for r in transport.sent] == [1, 2]
    core.deliver(done(2, "two"))
    core.deliver(m.Delta(1, tokens=[1]))
    core.deliver(done(1, "one"))
    assert [type(e) for e in events(first)] == [m.Delta, m.Done]
    assert [e.text for e in events(second)] == ["two"]


def test_nothing_follows_a_terminal_reply(core):
    pending = turn(core)
    core.deliver(done(1))
    core.deliver(m.Delta(1, tokens=[1]))
    core.deliver(done(1, "again"))
    assert [e.text for e in events(pending)] == ["ok"]


def test_a_request_that_cannot_be_sent_is_not_open(core, transport):
    with pytest.raises(InvalidRequest):
        turn(core, text="\ud800")
    core.lost(LOST, final=True)
    assert transport.sent == []


def test_a_loss_ends_what_has_no_key_and_keeps_what_has(core, transport):
    plain, keyed = turn(core), turn(core, idempotency_key="k")
    core.deliver(m.Delta(2, attempt=3, tokens=[1]))
    core.lost(LOST, final=False)
    (error,) = events(plain)
    assert isinstance(error, ConnectionLost)
    assert error is not LOST
    assert not keyed.ended
    core.restored()
    assert transport.sent[2:] == [
        m.Turn(2, session="a", text="x", stream=True, idempotency_key="k", attempt=3)
    ]
    core.deliver(done(2))
    assert [type(e) for e in events(keyed)] == [m.Delta, m.Done]


def test_without_connection_only_keyed_requests_are_taken_and_sent_later(core, transport):
    core.lost(LOST, final=False)
    with pytest.raises(ConnectionLost):
        turn(core)
    keyed = turn(core, idempotency_key="k")
    assert transport.sent == []
    core.restored()
    assert [r.id for r in transport.sent] == [keyed.request.id]


def test_giving_up_ends_keyed_requests_too_and_a_later_connection_is_used(core, transport):
    keyed = turn(core, idempotency_key="k")
    core.lost(LOST, final=False)
    core.lost(ConnectionLost("did not come back"), final=True)
    assert [e.message for e in events(keyed)] == ["did not come back"]
    with pytest.raises(ConnectionLost):
        turn(core, idempotency_key="k2")
    core.restored()
    turn(core)
    assert len(transport.sent) == 2


def test_a_turn_that_was_left_is_not_sent_again(core, transport):
    keyed = turn(core, idempotency_key="k")
    core.abandon(keyed)
    core.lost(LOST, final=False)
    assert keyed.ended
    core.restored()
    assert [type(r) for r in transport.sent] == [m.Turn, m.Cancel]


def test_taken_deltas_are_reported_before_the_heartbeat(core, transport):
    pending = turn(core)
    for delta in deltas(1, "x" * REPORT_EVERY):
        core.deliver(delta)
    for _ in range(REPORT_EVERY - 1):
        core.taken(pending.pop()[1])
    assert core.consumed == REPORT_EVERY - 1
    assert len(transport.sent) == 1
    core.taken(pending.pop()[1])
    assert transport.sent[1] == m.Ping(2, consumed=REPORT_EVERY)


def test_leaving_a_turn_returns_the_credit_of_what_was_and_will_be_unread(core, transport):
    pending = turn(core)
    for delta in deltas(1, "abc"):
        core.deliver(delta)
    core.abandon(pending)
    core.deliver(m.Delta(1, offset=3, tokens=[1]))
    core.deliver(m.Failure(1, code="turn_cancelled"))
    core.deliver(m.Delta(99, tokens=[1]))
    assert core.consumed == 5
    assert transport.sent[1:] == [m.Cancel(2, request=1)]
    assert [type(e) for e in events(pending)] == [m.Failure]


def test_a_full_queue_grows_its_last_delta_and_counts_them_all(core):
    pending = turn(core)
    text = "".join(chr(97 + i % 26) for i in range(MAX_QUEUED + 50))
    for delta in deltas(1, text):
        core.deliver(delta)
    core.deliver(done(1, text))
    taken = []
    while (item := pending.pop()) is not None:
        taken.append(item)
    assert len(taken) == MAX_QUEUED + 1
    assert sum(count for _, count in taken) == len(text)
    assert "".join(e.text for e, _ in taken[:-1]) == text
    assert [t for e, _ in taken[:-1] for t in e.tokens] == [ord(c) for c in text]


def test_waiting_ends_with_the_event_or_the_timeout():
    pending = Pending(m.Stats(1))
    assert pending.get(0.001) is None
    pending.push(m.Result(1, 5))
    assert pending.get() == (m.Result(1, 5), 0)
    assert pending.get(0.001) is None


def test_wake_is_called_once_for_each_time_the_queue_stops_being_empty():
    calls = []
    pending = Pending(m.Turn(1, session="a", text="x"), lambda: calls.append(1))
    for delta in deltas(1, "abc"):
        pending.push(delta)
    assert len(calls) == 1
    while pending.pop():
        pass
    pending.push(done(1))
    assert len(calls) == 2


def test_after_close_everything_is_refused(core, transport):
    pending = turn(core)
    core.close()
    (error,) = events(pending)
    assert isinstance(error, EngineClosed)
    with pytest.raises(EngineClosed):
        turn(core)
    core.cancel(pending)
    core.taken(1000)


def test_a_failed_resend_ends_that_request_alone(core, transport):
    first, second = turn(core, idempotency_key="a"), turn(core, idempotency_key="b")
    core.lost(LOST, final=False)

    def refuse_first(request: m.Request) -> None:
        if request.id == 1:
            raise TurnCancelled("no")
        transport.sent.append(request)

    transport.send = refuse_first
    core.restored()
    assert [type(e) for e in events(first)] == [TurnCancelled]
    assert not second.ended
    assert isinstance(transport.sent[-1], m.Turn)
