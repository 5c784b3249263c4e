"""A keyed turn runs once, whatever happens to connections and engines, and is told in full."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sessionkv import Client, LimitsConfig, SamplingParams, launch
from sessionkv.errors import (
    ConnectionLost,
    DeadlineExceeded,
    IdempotencyConflict,
    SessionBusy,
    TurnFailed,
)
from tests.builders.checksum import tokens
from tests.builders.doors import KINDS, Door, Hold, Later, open_door
from tests.builders.engine import GREEDY, SocketEngine, engine_config, greedy, oracle, socket_engine
from tests.builders.fake_engine import short_endpoint
from tests.builders.wire_client import WireClient

PATIENT = LimitsConfig(heartbeat_s=1.0, missed_heartbeats=1000, drain_s=0.5)
ON_AND_ON = greedy(None, ignore_eos=False)
WILD = SamplingParams(max_tokens=12, ignore_eos=True)  # without seed: each run is another


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def door(kind: str) -> Iterator[Door]:
    with open_door(kind, engine_config(blocks=512)) as door:
        yield door
        door.assert_ledger()


@contextlib.contextmanager
def held_engine(hold: Hold, **fields: object) -> Iterator[SocketEngine]:
    """A served engine whose turns go on until ``hold`` is released."""
    config = engine_config(blocks=16_384, limits=fields.pop("limits", PATIENT))
    with short_endpoint() as endpoint:
        folder = Path(endpoint.removeprefix("ipc://")).parent
        runner = {"script": hold.script}
        try:
            with socket_engine(folder, config, gate=hold.gate, runner=runner) as engine:
                yield engine
        finally:
            hold.release()


def test_a_repeated_turn_is_replayed_and_not_run(door: Door) -> None:
    session = door.client.open("a")
    first = session.turn("x", sampling=WILD, idempotency_key="k")
    again = session.turn("x", sampling=WILD, idempotency_key="k")
    assert again == replace(first, replayed=True)
    stream = session.stream("x", sampling=WILD, idempotency_key="k")
    events = list(stream)
    assert "".join(event.text for event in events) == first.text
    assert stream.result == again
    assert session.info().turns == 1
    session.rewind()
    assert session.turn("x", sampling=WILD, idempotency_key="k") == again
    assert session.info().turns == 0


def test_a_repeated_generation_is_replayed(door: Door) -> None:
    sampling = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2)
    first = door.client.generate("héllo", sampling=sampling, idempotency_key="k")
    again = door.client.generate("héllo", sampling=sampling, idempotency_key="k")
    assert again == replace(first, replayed=True)
    assert again.logprobs is not None


def test_a_key_stands_for_one_request(door: Door) -> None:
    session = door.client.open("a")
    other = door.client.open("b")
    session.turn(tokens=[1], sampling=GREEDY, idempotency_key="k")
    for call in (
        lambda: session.turn(tokens=[2], sampling=GREEDY, idempotency_key="k"),
        lambda: session.turn(tokens=[1], sampling=greedy(9), idempotency_key="k"),
        lambda: other.turn(tokens=[1], sampling=GREEDY, idempotency_key="k"),
        lambda: door.client.generate(tokens=[1], sampling=GREEDY, idempotency_key="k"),
    ):
        with pytest.raises(IdempotencyConflict):
            call()
    result = session.turn(
        tokens=[1], sampling=GREEDY, idempotency_key="k",
        deadline_s=9, priority=3, when_busy="queue",
    )  # fmt: skip
    assert result.replayed
    assert (session.info().turns, other.info().turns) == (1, 0)


def test_turns_that_failed_or_were_cancelled_leave_the_key_free(kind: str) -> None:
    failures = [True, False]
    runner = {"fail_sequence": lambda seq_id, ids: ids[-1] == 13 and failures.pop(0)}
    with open_door(kind, engine_config(), runner=runner) as door:
        session = door.client.open("a")
        with pytest.raises(TurnFailed):
            session.turn(tokens=[13], sampling=greedy(1), idempotency_key="k")
        assert not session.turn(tokens=[13], sampling=greedy(1), idempotency_key="k").replayed
        door.assert_ledger()


def test_cancelled_late_and_refused_turns_leave_the_key_free(kind: str) -> None:
    hold = Hold()
    config = engine_config(blocks=16_384)
    with open_door(kind, config, gate=hold.gate, runner={"script": hold.script}) as door:
        session = door.client.open("a")
        stream = session.stream("x", sampling=ON_AND_ON, idempotency_key="k")
        next(stream)
        with pytest.raises(SessionBusy):
            session.turn("y", sampling=GREEDY, idempotency_key="k2")
        stream.cancel()
        with pytest.raises(DeadlineExceeded):
            session.turn("x", sampling=ON_AND_ON, idempotency_key="k", deadline_s=0.05)
        kept = session.stream("x", sampling=ON_AND_ON, idempotency_key="k")
        next(kept)
        result = kept.cancel(keep=True)
        hold.release()
        again = session.turn("x", sampling=ON_AND_ON, idempotency_key="k")
        assert again == replace(result, replayed=True)
        assert not session.turn("y", sampling=GREEDY, idempotency_key="k2").replayed
        assert session.info().turns == 2
        door.assert_ledger()


def test_only_so_many_keys_are_kept_and_only_so_long(kind: str) -> None:
    limits = LimitsConfig(idempotency_keys=3)
    with open_door(kind, engine_config(limits=limits)) as door:
        for i in (*range(5), 4, 3, 2, 1):
            result = door.client.generate(tokens=[i], sampling=WILD, idempotency_key=f"{i}")
        assert not result.replayed  # 1 was forgotten, so it ran again and 2 is the oldest now
        assert door.client.generate(tokens=[4], sampling=WILD, idempotency_key="4").replayed
    limits = LimitsConfig(idempotency_ttl_s=0.001)
    with open_door(kind, engine_config(limits=limits)) as door:
        for _ in range(3):
            assert not door.client.generate(
                tokens=[1], sampling=GREEDY, idempotency_key="k"
            ).replayed


def test_a_retry_attaches_to_the_run_and_hears_all_of_it() -> None:
    hold = Hold()
    with (
        held_engine(hold) as engine,
        WireClient(engine.endpoint) as one,
        WireClient(engine.endpoint) as two,
    ):
        one.call("open", 1, session="a")
        turn = {"session": "a", "tokens": [1], "stream": True, "idempotency_key": "k",
                "sampling": {"temperature": 0, "logprobs": 0}}  # fmt: skip
        one.send("turn", 2, **turn)
        seen = [one.receive() for _ in range(5)]
        two.send("turn", 7, **turn)
        first = two.receive()
        assert (first["t"], first["offset"], first["attempt"]) == ("delta", 0, seen[0]["attempt"])
        assert len(first["tokens"]) >= 5
        heard = [first]
        two.send("turn", 8, **{**turn, "tokens": [2]})
        while (reply := two.receive())["id"] != 8:
            heard.append(reply)
        assert reply["code"] == "idempotency_conflict"
        # Not streaming, it waits for the end alone.
        two.send("turn", 9, **{**turn, "stream": False})
        hold.release()
        mine = [*seen, *one.until(2)]
        theirs = [*heard, *two.until(7)]
        for replies in (mine, theirs):
            *deltas, done = replies
            assert [t for d in deltas for t in d["tokens"]] == done["tokens"]
            assert [x for d in deltas for x in d["logprobs"]] == done["logprobs"]
            assert "".join(d["text"] for d in deltas) == done["text"]
        assert {**mine[-1], "id": 0} == {**theirs[-1], "id": 0}
        assert not mine[-1]["replayed"]


@pytest.mark.parametrize("goodbye", [True, False])
def test_a_lost_clients_turn_runs_on_with_a_key_and_is_cancelled_without(goodbye: bool) -> None:
    hold = Hold()
    limits = LimitsConfig(heartbeat_s=0.2, missed_heartbeats=3)
    with held_engine(hold, limits=limits) as engine, Client(engine.endpoint) as client:
        lost = WireClient(engine.endpoint)
        for number, fields in enumerate(({}, {"idempotency_key": "k"})):
            lost.call("open", 2 * number + 1, session=f"s{number}")
            lost.send("turn", 2 * number + 2, session=f"s{number}", tokens=[number], stream=True,
                      sampling={"temperature": 0}, **fields)  # fmt: skip
        hold.wait_going()
        while not client.session("s1").info().running:
            pass
        if goodbye:
            lost.send("bye", 9)
        while client.session("s0").info().running:
            pass
        assert client.session("s0").info().turns == 0
        assert client.session("s1").info().running
        with WireClient(engine.endpoint) as back:
            back.send("turn", 1, session="s1", tokens=[1], stream=True, idempotency_key="k",
                      sampling={"temperature": 0})  # fmt: skip
            first = back.receive()
            assert first["offset"] == 0
            hold.release()
            *_, done = back.until(1)
        assert done["t"] == "done"
        assert client.session("s1").info().turns == 1
        lost.close()


def test_what_was_committed_unheard_is_the_same_attempt() -> None:
    hold = Hold()
    with held_engine(hold) as engine, WireClient(engine.endpoint) as client:
        client.call("open", 1, session="a")
        turn = {"session": "a", "tokens": [1], "stream": True, "idempotency_key": "k"}
        client.send("turn", 2, **turn)
        heard = [client.receive() for _ in range(3)]
        hold.release()
        *_, done = client.until(2)
        with WireClient(engine.endpoint) as back:
            back.send("turn", 1, **turn, attempt=heard[0]["attempt"])
            whole, again = back.until(1)
            assert (whole["t"], whole["offset"], whole["attempt"]) == (
                "delta", 0, heard[0]["attempt"],
            )  # fmt: skip
            assert whole["tokens"] == again["tokens"] == done["tokens"]
            assert (again["attempt"], again["replayed"]) == (heard[0]["attempt"], True)
            other = 1 if heard[0]["attempt"] != 1 else 2
            back.send("turn", 2, **turn, attempt=other)
            assert [r["t"] for r in back.until(2)] == ["restarted", "delta", "done"]


def first_attempt(engine: SocketEngine, client: WireClient, attempt: int) -> list[dict]:
    """The first replies to a keyed turn that streams on and on."""
    client.call("open", 1, session="a")
    client.send("turn", 2, session="a", tokens=[1], stream=True, idempotency_key="k",
                attempt=attempt)  # fmt: skip
    return [client.receive(), client.receive()]


def test_whoever_comes_first_after_a_restart_old_deltas_are_not_mixed_with_new_ones() -> None:
    hold = Hold()
    with held_engine(hold) as engine, WireClient(engine.endpoint) as client:
        old = first_attempt(engine, client, 0)[0]["attempt"]
    hold = Hold()
    with (
        held_engine(hold) as engine,
        WireClient(engine.endpoint) as fresh,
        WireClient(engine.endpoint) as back,
    ):
        delta = first_attempt(engine, fresh, 0)[0]
        assert delta["attempt"] != old
        restarted, whole = first_attempt(engine, back, old)
        assert (restarted["t"], restarted["attempt"]) == ("restarted", delta["attempt"])
        assert (whole["t"], whole["offset"], whole["attempt"]) == ("delta", 0, delta["attempt"])


# Real processes ---------------------------------------------------------------------------------


def test_a_killed_engine_replays_what_it_committed(tmp_path: Path) -> None:
    with launch("checksum", store=tmp_path) as engine:
        client = engine.client()
        session = client.open("a", system="s")
        turn = session.turn("x", sampling=WILD, idempotency_key="turn")
        prompt = client.generate("x", sampling=WILD, idempotency_key="prompt")
        engine.kill()
    with launch("checksum", store=tmp_path) as engine:
        client = engine.client()
        session = client.session("a")
        again = session.turn("x", sampling=WILD, idempotency_key="turn")
        assert again == replace(turn, replayed=True)
        with pytest.raises(IdempotencyConflict):
            session.turn("y", sampling=WILD, idempotency_key="turn")
        assert client.generate("x", sampling=WILD, idempotency_key="prompt") == replace(
            prompt, replayed=True
        )
        assert session.info().turns == 1
        assert session.turn("y", sampling=GREEDY).cache.miss.reason != "none"


def test_a_keyed_stream_outlives_a_killed_engine(tmp_path: Path) -> None:
    with short_endpoint() as endpoint, contextlib.ExitStack() as stack:
        first = stack.enter_context(launch("checksum", store=tmp_path, endpoint=endpoint))
        client = stack.enter_context(Client(endpoint))
        keyed, plain = client.open("keyed"), client.open("plain")
        lost = plain.stream(tokens=[2], sampling=greedy(100_000))
        stream = keyed.stream(tokens=[1], sampling=greedy(3_000), idempotency_key="k")
        events = [next(stream) for _ in range(5)]
        next(lost)
        first.kill()
        stack.enter_context(launch("checksum", store=tmp_path, endpoint=endpoint))
        events += list(stream)
        at = [event.restarted for event in events].index(True)
        assert at >= 5
        assert [event.restarted for event in events].count(True) == 1
        after = [t for event in events[at:] for t in event.tokens]
        assert after == list(stream.result.tokens) == oracle([1], greedy(3_000))
        assert "".join(event.text for event in events[at:]) == stream.result.text
        with pytest.raises(ConnectionLost):
            list(lost)
        assert [s.turns for s in client.sessions()] == [1, 0]


def test_a_keyed_turn_outlives_a_killed_engine(tmp_path: Path) -> None:
    with short_endpoint() as endpoint, contextlib.ExitStack() as stack:
        first = stack.enter_context(launch("checksum", store=tmp_path, endpoint=endpoint))
        client = stack.enter_context(Client(endpoint))
        session = client.open("a")
        turn = Later(
            lambda: session.turn(tokens=tokens(5), sampling=greedy(3_000), idempotency_key="k")
        )
        while not session.info().running:
            pass
        first.kill()
        stack.enter_context(launch("checksum", store=tmp_path, endpoint=endpoint))
        assert list(turn.result().tokens) == oracle(tokens(5), greedy(3_000))
        assert session.info().turns == 1
