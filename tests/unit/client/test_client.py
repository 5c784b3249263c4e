"""Both clients against the scripted engine over a real socket."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from sessionkv.client import AsyncClient, Client, PinInfo, TierBytes
from sessionkv.client.pending import Pending
from sessionkv.config import LimitsConfig
from sessionkv.errors import (
    ConnectionLost,
    EngineClosed,
    InvalidRequest,
    SessionBusy,
    TurnCancelled,
)
from sessionkv.ipc import messages as m
from sessionkv.types import FinishReason, MissReason, SamplingParams, Usage
from tests.builders.fake_engine import FakeEngine, deltas, echo, short_endpoint
from tests.builders.fake_transport import AnsweringTransport


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with short_endpoint() as endpoint, FakeEngine(endpoint) as engine:
        yield engine


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[Client]:
    with Client(engine.endpoint) as client:
        yield client


def requests(engine: FakeEngine) -> list[m.Request]:
    """What came, without hellos, heartbeats and goodbyes."""
    return [r for _, r in engine.requests if not isinstance(r, m.Hello | m.Ping | m.Bye)]


def test_a_turn_returns_everything(client, engine):
    session = client.open("trip", system="Be brief.", tools=[{"name": "f"}], history="follow")
    result = session.turn("hello", sampling=SamplingParams(temperature=0.0), priority=2)
    assert result.text == "hello"
    assert result.tokens == tuple(b"hello")
    assert result.finish_reason is FinishReason.STOP
    assert result.usage == Usage(3, 2)
    assert (result.cache.cached_tokens, result.cache.miss.reason) == (1, MissReason.FIRST_TURN)
    assert requests(engine) == [
        m.Open(1, session="trip", system="Be brief.", tools=({"name": "f"},), history="follow"),
        m.Turn(
            2,
            session="trip",
            text="hello",
            sampling=SamplingParams(temperature=0.0),
            priority=2,
        ),
    ]


def test_every_operation_reaches_the_engine(client, engine):
    session = client.session("trip")
    fork = session.fork("trip-b")
    assert fork.name == "trip-b"
    session.rewind(turns=2)
    info = session.pin(tier="host", ttl_s=3600, priority=9)
    session.unpin()
    session.info(history=True)
    session.close(keep=False)
    session.close()
    client.delete("other")
    assert client.flush() == {"blocks": 3}
    assert client.stats() == {"blocks": 3}
    client.generate(prompt="p", cache=False)
    client.generate(tokens=[1, 2])
    client.generate(messages=[{"role": "user", "content": "x"}], tools=[{"name": "f"}])
    assert requests(engine) == [
        m.Fork(1, session="trip", name="trip-b"),
        m.Rewind(2, session="trip", turns=2),
        m.Pin(3, session="trip", tier="host", ttl_s=3600.0, priority=9),
        m.Unpin(4, session="trip"),
        m.Info(5, session="trip", history=True),
        m.Close(6, session="trip", keep=False),
        m.Close(7, session="other", keep=False),
        m.Flush(8),
        m.Stats(9),
        m.Generate(10, prompt="p", cache=False),
        m.Generate(11, tokens=(1, 2)),
        m.Generate(
            12, messages=({"role": "user", "content": "x"},), tools=({"name": "f"},)
        ),
    ]  # fmt: skip
    assert info.pin == PinInfo("host", 9.0, 50)
    assert info.bytes == {"device": TierBytes(10, 20)}
    assert (info.turns, info.tokens, info.kind, info.node) == (1, 5, "chat", "7")
    assert info.last_cache.computed_tokens == 2
    assert info.messages == ({"role": "user", "content": "hi"},)


def test_lists_are_read_page_by_page(client):
    assert [s.name for s in client.sessions()] == ["a1", "a2", "b1"]
    assert [s.name for s in client.sessions("b")] == ["b1"]


def test_a_stream_ends_with_the_result(client):
    stream = client.session("trip").stream("abc")
    assert stream.result is None
    events = list(stream)
    assert "".join(e.text for e in events) == "abc"
    assert [e.offset for e in events] == [0, 1, 2, 3]
    assert events[-1].result is stream.result
    assert stream.result.text == "abc"
    assert list(stream) == []
    assert [e.text for e in client.stream_generate("xy")] == ["x", "y", ""]


def test_leaving_a_stream_early_cancels_the_turn_and_the_next_one_runs(client, engine):
    session = client.session("trip")
    engine._answer = lambda r: [] if r.text == "first" else echo(r)
    stream = session.stream("first")
    ((conn, turn),) = engine.wait_for(m.Turn)
    engine.send(conn, deltas(turn.id, "a")[0])
    for event in stream:
        assert event.text == "a"
        break
    del stream, event
    gc.collect()
    assert session.turn("second").text == "second"
    kinds = [type(r) for r in requests(engine)]
    assert kinds == [m.Turn, m.Cancel, m.Turn]


def test_closing_a_stream_is_enough_and_may_be_done_twice(client, engine):
    with client.session("trip").stream("hold") as stream:
        engine.wait_for(m.Turn)
    stream.close()
    engine.wait_for(m.Cancel)
    assert list(stream) == []
    client.stats()
    assert [type(r) for r in requests(engine)] == [m.Turn, m.Cancel, m.Stats]


def test_cancel_waits_for_the_end_and_keeps_on_demand(client, engine):
    session = client.session("trip")
    stream = session.stream("hold")
    assert stream.cancel() is None
    assert list(stream) == []
    kept = session.stream("hold")
    result = kept.cancel(keep=True)
    assert (result.text, result.finish_reason) == ("kept", FinishReason.CANCELLED)
    assert kept.result is result
    assert kept.cancel() is result
    assert [r.keep for r in requests(engine) if isinstance(r, m.Cancel)] == [False, True]


def test_another_thread_may_cancel(client, engine):
    stream = client.session("trip").stream("hold")
    seen: list[object] = []
    reader = threading.Thread(target=lambda: seen.extend(stream))
    reader.start()
    ((conn, turn),) = engine.wait_for(m.Turn)
    engine.send(conn, deltas(turn.id, "a")[0])
    canceller = threading.Thread(target=stream.cancel)
    canceller.start()
    canceller.join(10)
    reader.join(10)
    assert not reader.is_alive()
    assert {e.text for e in seen} <= {"a"}


def test_a_cancel_by_somebody_else_is_an_error(client, engine):
    stream = client.session("trip").stream("hold")
    ((conn, turn),) = engine.wait_for(m.Turn)
    engine.send(conn, m.Failure(turn.id, code="turn_cancelled", message="closed elsewhere"))
    with pytest.raises(TurnCancelled, match="closed elsewhere"):
        list(stream)


@pytest.mark.parametrize("breaks_the_wait", [True, False])
def test_an_interrupt_cancels_the_turn(client, engine, breaks_the_wait):
    """Also one that does not end the main thread's wait, as when it comes just before it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where run in the background
    session = client.session("trip")

    def interrupt() -> None:
        engine.wait_for(m.Turn)
        if breaks_the_wait:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        session.turn("hold")
    helper.join()
    engine.wait_for(m.Cancel)
    assert session.turn("on").text == "on"


def test_an_interrupt_cancels_a_stream(client, engine, monkeypatch):
    def interrupted(pending: Pending, timeout_s: float | None = None) -> None:
        raise KeyboardInterrupt

    stream = client.session("trip").stream("hold")
    with monkeypatch.context() as patch:
        patch.setattr(Pending, "get", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    engine.wait_for(m.Cancel)
    assert list(stream) == []


def test_errors_of_the_engine_have_their_class_and_details(client, engine):
    engine._answer = lambda r: [
        m.Failure(r.id, code="session_busy", message="busy", details={"queued": 1})
    ]
    with pytest.raises(SessionBusy, match="busy") as caught:
        client.session("trip").turn("x")
    assert caught.value.retryable
    assert caught.value.details == {"queued": 1}


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda c: c.open("a\ud800"), "session"),
        (lambda c: c.open("a", system="\udfff"), "system"),
        (lambda c: c.session("a").turn("x\ud83d"), "text"),
        (lambda c: c.session("a").stream("x\ud83d"), "text"),
        (
            lambda c: c.generate(messages=[{"role": "user", "content": "\ud800"}]),
            "messages[0].content",
        ),
        (lambda c: c.generate(prompt="\ud800"), "prompt"),
        (lambda c: c.sessions("\ud800"), "prefix"),
    ],
)
def test_lone_surrogates_are_refused_before_sending(client, engine, call, field):
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        call(client)
    assert caught.value.details["field"] == field
    client.stats()
    assert requests(engine)[0] == m.Stats(requests(engine)[0].id)


def test_an_unknown_option_is_an_error_of_the_caller(client):
    with pytest.raises(TypeError):
        client.session("a").turn("x", temperature=0.0)


def test_a_session_as_context_closes_and_keeps(client, engine):
    with client.open("trip") as session:
        pass
    assert requests(engine)[-1] == m.Close(2, session="trip", keep=True)
    with pytest.raises(EngineClosed, match="trip"):
        session.turn("x")


def test_the_error_that_leaves_a_context_is_the_one_seen():
    limits = LimitsConfig(heartbeat_s=0.1)

    def leave_by_error(client: Client, engine: FakeEngine) -> None:
        with client.open("trip"):
            engine.stop()
            raise ValueError("mine")

    with (
        short_endpoint() as endpoint,
        FakeEngine(endpoint, limits=limits) as engine,
        Client(endpoint) as client,
        pytest.raises(ValueError, match="mine"),
    ):
        leave_by_error(client, engine)


def test_a_closed_client_says_so_and_ends_what_is_open(client, engine):
    stream = client.session("trip").stream("hold")
    engine.wait_for(m.Turn)
    client.close()
    client.close()
    with pytest.raises(EngineClosed):
        list(stream)
    with pytest.raises(EngineClosed):
        client.stats()
    engine.wait_for(m.Bye)


def test_a_session_keeps_its_connection_open(engine):
    session = Client(engine.endpoint).open("trip")
    gc.collect()
    assert session.turn("still here").text == "still here"
    session._client.close()


def test_without_engine_the_error_is_immediate_and_says_what_to_do():
    with short_endpoint() as endpoint, pytest.raises(ConnectionLost, match="sessionkv serve"):
        Client(endpoint)


def test_an_answer_that_never_comes_is_an_error_in_time(engine):
    with Client(engine.endpoint, timeout_s=0.2) as client:
        client.stats()
        engine.mute.set()
        with pytest.raises(ConnectionLost, match=r"no answer to 'stats' within 0\.2 s"):
            client.stats()
        engine.mute.clear()


def test_any_transport_will_do():
    transport = AnsweringTransport(echo)
    with Client(transport=transport) as client:
        assert client.generate(prompt="hi").text == "hi"
        assert [e.text for e in client.stream_generate("ab")] == ["a", "b", ""]
        with pytest.raises(InvalidRequest, match="surrogate"):
            client.generate(prompt="\ud800")


def test_async_turns_streams_and_operations(engine):
    async def main() -> None:
        async with AsyncClient(engine.endpoint) as client:
            async with await client.open("trip", system="s") as session:
                assert (await session.turn("hello")).text == "hello"
                stream = session.stream("abc")
                assert [e.text async for e in stream] == ["a", "b", "c", ""]
                assert stream.result.text == "abc"
                await session.fork("b")
                await session.rewind()
                assert (await session.pin(ttl_s=5)).pin == PinInfo("host", 9.0, 50)
                await session.unpin()
                assert (await session.info(history=True)).turns == 1
            with pytest.raises(EngineClosed):
                await session.turn("x")
            assert [s.name for s in await client.sessions()] == ["a1", "a2", "b1"]
            await client.delete("b")
            assert await client.flush() == {"blocks": 3}
            assert await client.stats() == {"blocks": 3}
            assert (await client.generate(prompt="p")).text == "p"
            assert [e.text async for e in client.stream_generate("xy")] == ["x", "y", ""]
            with pytest.raises(InvalidRequest, match="surrogate"):
                await client.generate(prompt="\ud800")

    asyncio.run(main())
    kinds = [type(r) for r in requests(engine)]
    assert kinds == [
        m.Open, m.Turn, m.Turn, m.Fork, m.Rewind, m.Pin, m.Unpin, m.Info, m.Close, m.List, m.List,
        m.Close, m.Flush, m.Stats, m.Generate, m.Generate,
    ]  # fmt: skip


def test_cancelling_a_task_cancels_its_turn(engine):
    async def main() -> None:
        async with AsyncClient(engine.endpoint) as client:
            session = client.session("trip")
            task = asyncio.create_task(session.turn("hold"))
            await asyncio.to_thread(engine.wait_for, m.Turn)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await session.turn("on")).text == "on"

    asyncio.run(main())
    assert [type(r) for r in requests(engine)] == [m.Turn, m.Cancel, m.Turn]


def test_async_streams_cancel_as_the_blocking_ones_do(engine):
    async def main() -> None:
        async with AsyncClient(engine.endpoint) as client:
            session = client.session("trip")
            engine._answer = lambda r: [] if r.text == "hold" else echo(r)
            left = session.stream("abc")
            async for event in left:
                assert event.text == "a"
                break
            await left.aclose()
            assert [e async for e in left] == []
            dropped = session.stream("hold")
            waiting = asyncio.create_task(anext(dropped))
            await asyncio.to_thread(engine.wait_for, m.Turn, 2)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            kept = session.stream("hold")
            waiting = asyncio.create_task(anext(kept))
            ((conn, _), _, (_, turn)) = await asyncio.to_thread(engine.wait_for, m.Turn, 3)
            engine.send(conn, deltas(turn.id, "a")[0])
            assert (await waiting).text == "a"
            assert (await kept.cancel(keep=True)).text == "kept"
            assert await session.stream("never started").cancel() is None

    asyncio.run(main())


def test_many_tasks_share_one_connection(engine):
    async def main() -> None:
        async with AsyncClient(engine.endpoint) as client:
            texts = [f"text {i}" for i in range(200)]
            results = await asyncio.gather(*[client.session("s").turn(t) for t in texts])
            assert [r.text for r in results] == texts

    asyncio.run(main())
    assert len({conn for conn, r in engine.requests if isinstance(r, m.Turn)}) == 1


def test_an_async_client_serves_several_loops(engine):
    client = AsyncClient(engine.endpoint)
    for text in ("first loop", "second loop"):
        assert asyncio.run(client.generate(prompt=text)).text == text
    asyncio.run(client.close())


def test_a_reply_after_its_loop_is_gone_harms_nothing(engine):
    client = AsyncClient(engine.endpoint)

    async def start_and_leave() -> None:
        stream = client.session("a").stream("hold")
        waiting = asyncio.create_task(anext(stream))
        await asyncio.to_thread(engine.wait_for, m.Turn)
        waiting.cancel()

    asyncio.run(start_and_leave())
    assert asyncio.run(client.generate(prompt="on")).text == "on"
    asyncio.run(client.close())


CALLS = ("turn", "stream", "generate", "stream_generate")


def run_call(client: Client, name: str, **options: object) -> None:
    """``client.NAME("hi", **options)``, or the session's."""
    on = client.session("s") if name in ("turn", "stream") else client
    getattr(on, name)("hi", **options)


async def run_async_call(endpoint: str, name: str, **options: object) -> None:
    async with AsyncClient(endpoint) as client:
        on = client.session("s") if name in ("turn", "stream") else client
        found = getattr(on, name)("hi", **options)
        await (anext(found) if "stream" in name else found)


@pytest.mark.parametrize("name", CALLS)
def test_sampling_that_is_a_plain_map_is_refused_with_what_it_should_be(client, engine, name):
    words = r"sampling is {'temperature': 0}; allowed: SamplingParams\(\.\.\.\)"
    with pytest.raises(InvalidRequest, match=words):
        run_call(client, name, sampling={"temperature": 0})
    with pytest.raises(InvalidRequest, match=words):
        asyncio.run(run_async_call(engine.endpoint, name, sampling={"temperature": 0}))
    assert requests(engine) == []


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("option", ["max_tokens", "temperature", "stop"])
def test_a_sampling_parameter_given_as_an_option_is_told_where_it_belongs(
    client, engine, name, option
):
    words = rf"{option} belongs in sampling=SamplingParams\({option}=\.\.\.\)"
    with pytest.raises(TypeError, match=words):
        run_call(client, name, **{option: 3})
    with pytest.raises(TypeError, match=words):
        asyncio.run(run_async_call(engine.endpoint, name, **{option: 3}))
    assert requests(engine) == []


def test_a_stream_without_deltas_is_one_event_with_all_of_it(client):
    (event,) = client.session("trip").stream("abc", deltas=False)
    assert (event.text, event.result.text) == ("abc", "abc")
    (event,) = client.stream_generate("xy", deltas=False)
    assert event.result.text == "xy"
