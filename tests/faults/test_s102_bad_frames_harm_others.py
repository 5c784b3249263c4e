"""Junk of every kind is answered or dropped; the engine lives and other clients notice nothing."""

from __future__ import annotations

from collections.abc import Iterator

import msgpack
import pytest
import zmq

from sessionkv.client import Client
from sessionkv.errors import InvalidRequest
from sessionkv.ipc import messages as m
from sessionkv.types import SamplingParams
from tests.builders.fake_engine import FakeEngine, short_endpoint

MIB = 1024**2
STATS = msgpack.packb({"v": 1, "t": "stats", "id": 7})


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
    [
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
    ],
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
