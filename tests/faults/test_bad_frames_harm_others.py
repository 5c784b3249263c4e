"""Junk of every kind is answered or dropped; the engine lives and other clients notice nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import zmq

from sessionkv.client import Client
from sessionkv.errors import InvalidRequest, PromptTooLong
from sessionkv.ipc import messages as m
from sessionkv.types import SamplingParams
from tests.builders.doors import Later
from tests.builders.engine import SocketEngine, engine_config, greedy, oracle, socket_engine
from tests.builders.fake_engine import FakeEngine, short_endpoint
from tests.builders.wire_client import WireClient

MIB = 1024**2
STATS = msgpack.packb({"v": 1, "t": "stats", "id": 7})


JUNK = [
    ([b""], -1),
    ([b"\xc1"], -1),
    ([STATS[:-1]], -1),
    ([STATS + b"\0"], -1),
    ([b"", STATS], -1),
    ([STATS] * 5, -1),
    ([msgpack.packb({"v": 9, "t": "stats", "id": 7})], 7),
    ([msgpack.packb({"v": 1, "t": "nothing", "id": 7})], 7),
    ([msgpack.packb({"v": 1, "t": "stats", "id": 2**64 - 1})], -1),
    ([msgpack.packb({1: 2})], -1),
    ([b"\x91" * 2000], -1),
    ([b"\xdd\xff\xff\xff\xff"], -1),
    ([b"\xdb\xff\xff\xff\xff"], -1),
    ([b"\x82\xa1v\x01\xa1t\xa3\xff\xfe\xfd"], -1),
    ([b"x" * (17 * MIB)], -1),
    ([b"x" * (120 * MIB)], -1),
]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with short_endpoint() as endpoint, FakeEngine(endpoint) as engine:
        yield engine


@pytest.fixture
def raw(engine: FakeEngine) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.rcvtimeo = 20_000
    socket.connect(engine.endpoint)
    yield socket
    socket.close()
    context.term()


@pytest.mark.parametrize(
    ("frames", "request_id"),
    JUNK,
    ids=lambda value: (
        str(value)[:24] if isinstance(value, int) else f"{len(value)}x{len(value[0])}"
    ),
)
def test_junk_is_answered_and_everybody_else_served(engine, raw, frames, request_id):
    with Client(engine.endpoint) as client:
        assert client.generate(prompt="before").text == "before"
        raw.send_multipart(frames)
        answer = msgpack.unpackb(raw.recv())
        assert (answer["t"], answer["id"]) == ("error", request_id)
        assert answer["code"] in ("protocol_violation", "invalid_request")
        assert client.generate(prompt="after").text == "after"
    assert len(engine.malformed) == 1


def test_a_big_prompt_passes_and_one_over_the_limit_is_refused_before_sending(engine):
    with Client(engine.endpoint) as client:
        big = "x" * (8 * MIB)
        engine._answer = lambda r: [m.Done(r.id, text=str(len(r.prompt)))]
        assert client.generate(prompt=big).text == str(8 * MIB)
        with pytest.raises(InvalidRequest, match="at most 16777216 bytes"):
            client.generate(prompt=big * 2)
        assert client.generate(prompt="after").text == "5"


def test_integer_keys_of_logit_bias_arrive(engine):
    bias = {i: i / 10 for i in range(40)}
    with Client(engine.endpoint) as client:
        client.generate(prompt="x", sampling=SamplingParams(logit_bias=bias))
    ((_, request),) = engine.wait_for(m.Generate)
    assert request.sampling.logit_bias == bias


@pytest.fixture
def live() -> Iterator[SocketEngine]:
    with short_endpoint() as endpoint:
        folder = Path(endpoint.removeprefix("ipc://")).parent
        with socket_engine(folder, engine_config(blocks=8192)) as engine:
            yield engine


def meanwhile(engine: SocketEngine) -> Later:
    """Turns of somebody else, and whether they are all right."""

    def work() -> None:
        with Client(engine.endpoint) as client:
            session, log = client.open("other"), []
            for i in range(30):
                result = session.turn(tokens=[i], sampling=greedy(20))
                log.append(i)
                assert list(result.tokens) == oracle(log, greedy(20))
                log += result.tokens

    return Later(work)


def test_a_live_engine_answers_all_junk_and_serves_everybody_else(live):
    others = meanwhile(live)
    with WireClient(live.endpoint) as known, WireClient(live.endpoint, hello=False) as stranger:
        for wire in (known, stranger):
            for frames, request_id in JUNK:
                wire.socket.send_multipart(frames)
                answer = wire.receive()
                assert (answer["t"], answer["id"]) == ("error", request_id)
                assert answer["code"] in ("protocol_violation", "invalid_request")
        # The known one is as known as before, the stranger as strange.
        assert known.call("stats", 1)["t"] == "result"
        assert stranger.call("stats", 1)["code"] == "connection_lost"
        assert stranger.call("hello", 1)["t"] == "welcome"
    others.result()
    with Client(live.endpoint) as client:
        client.flush()
        assert client.stats()["book_errors"] == 0
        assert live.parts.kv.ledger().idle


def test_a_live_engine_survives_frames_with_bytes_changed(live):
    rng = random.Random(102)
    originals = [
        {"t": "open", "session": "a", "system": "s", "tools": [{"a": 1}]},
        {"t": "turn", "session": "a", "text": "hi", "stream": True,
         "sampling": {"max_tokens": 3, "stop": ["x"], "logit_bias": {1: 2.0}}},
        {"t": "turn", "session": "b", "tokens": [1, 2, 3], "sampling": {"max_tokens": 2}},
        {"t": "generate", "messages": [{"role": "user", "content": "x"}],
         "sampling": {"max_tokens": 2}, "idempotency_key": "k"},
        {"t": "cancel", "request": 3, "keep": True},
        {"t": "fork", "session": "a", "name": "c", "node": "n-1"},
        {"t": "rewind", "session": "a", "turns": 1},
        {"t": "pin", "session": "a", "tier": "host", "ttl_s": 1.5},
        {"t": "info", "session": "a", "history": True},
        {"t": "close", "session": "c", "keep": False},
        {"t": "list", "prefix": "a", "limit": 3},
        {"t": "ping", "consumed": 3},
    ]  # fmt: skip
    others = meanwhile(live)
    with WireClient(live.endpoint) as wire:
        for number in range(3000):
            frame = bytearray(msgpack.packb({"v": 1, "id": number + 10, **rng.choice(originals)}))
            for _ in range(rng.choice((0, 1, 1, 2, 8))):
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            wire.socket.send(bytes(frame))
            if number % 100 == 99:
                wire.send("ping", 9, consumed=number)
                while (reply := wire.receive())["id"] != 9:
                    assert reply["t"] in ("delta", "done", "error", "result", "welcome")
    others.result()
    with Client(live.endpoint) as client:
        while any(s.running for s in client.sessions()):
            pass
        client.flush()
        assert client.stats()["book_errors"] == 0


def test_a_live_engine_takes_big_prompts_up_to_its_limits(live):
    with Client(live.endpoint) as client:
        # Not one byte of it was made into tokens: 32,769 of the longest kind would be shorter.
        with pytest.raises(InvalidRequest, match="at most 425997 bytes: 32769 tokens"):
            client.generate("x" * (8 * MIB))
        with pytest.raises(InvalidRequest, match="messages is '8388608 bytes long'"):
            client.generate(messages=[{"role": "user", "content": "x" * MIB}] * 8)
        with pytest.raises(InvalidRequest, match="system is '8388608 bytes long'"):
            client.open("a", system="x" * (8 * MIB))
        with pytest.raises(PromptTooLong) as caught:
            client.generate("x" * 200_000)
        assert caught.value.details["n_prompt"] == 200_000
        with pytest.raises(PromptTooLong) as caught:
            client.generate(tokens=[1] * 4_000_000)
        assert caught.value.details["n_prompt"] == 4_000_000
        with pytest.raises(InvalidRequest, match="at most 16777216 bytes"):
            client.generate("x" * (16 * MIB))
        for bias in ({i: 1.0 for i in range(200)}, {"7": 1.0}):
            with WireClient(live.endpoint) as wire:
                reply = wire.call("generate", 1, tokens=[1],
                                  sampling={"logit_bias": bias, "max_tokens": 1})  # fmt: skip
                assert reply["t"] == "done"
        assert client.generate(tokens=[1], sampling=greedy(2)).tokens


def test_request_ids_in_use_are_refused_and_their_turns_go_on(live):
    with WireClient(live.endpoint) as wire:
        wire.call("open", 1, session="a")
        turn = {"session": "a", "tokens": [1], "stream": True,
                "sampling": {"temperature": 0, "ignore_eos": True, "max_tokens": 500}}  # fmt: skip
        wire.send("turn", 2, **turn)
        for kind, fields in (
            ("turn", turn),
            ("info", {"session": "a"}),
            ("generate", {"prompt": "x"}),
        ):
            wire.send(kind, 2, **fields)
        wire.send("nothing", 2)
        wire.send("pin", 2, session="a", tier="moon")
        wire.send("cancel", 2, request=2)
        replies, refused = [], []
        while not replies or replies[-1]["t"] != "done":
            reply = wire.receive()
            (refused if reply["id"] == -1 else replies).append(reply)
        in_use = "duplicate_request"
        assert [r["code"] for r in refused] == [
            in_use, in_use, in_use, "protocol_violation", "invalid_request", in_use,
        ]  # fmt: skip
        assert replies[-1]["tokens"] == oracle([1], greedy(500))
        assert wire.call("info", 2, session="a")["value"]["turns"] == 1
