"""Whatever bytes arrive, decoding raises nothing but a RequestError."""

from __future__ import annotations

import contextlib
import random
import struct

import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st

from sessionkv.config import LimitsConfig
from sessionkv.errors import ProtocolViolation, RequestError
from sessionkv.ipc import messages as m
from sessionkv.ipc.codec import decode_reply, decode_request, encode_request

LIMITS = LimitsConfig()
SEEDS = [
    encode_request(m.Turn(5, session="a", text="hello", stream=True), LIMITS),
    encode_request(m.Turn(6, session="a", messages=[{"role": "user", "content": "x"}]), LIMITS),
    encode_request(m.Generate(7, tokens=[1, 2, 3]), LIMITS),
    encode_request(m.Open(8, session="a", system="s", tools=[{"f": {"x": [1]}}]), LIMITS),
    encode_request(m.Pin(9, session="a", ttl_s=3.0), LIMITS),
]
FIELDS = sorted({name for cls in m.REQUESTS.values() for name in cls.__dataclass_fields__})

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=("Cs",)), max_size=5), inner)
    ),
    max_leaves=10,
)


def decode(*frames: bytes) -> m.Request | None:
    try:
        return decode_request(frames, LIMITS)
    except RequestError as error:
        msgpack.packb(error.to_wire())
        return None


def test_random_bytes():
    rng = random.Random(1)
    for _ in range(100_000):
        decode(rng.randbytes(rng.randrange(48)))


def test_damaged_frames():
    rng = random.Random(2)
    for _ in range(50_000):
        frame = bytearray(rng.choice(SEEDS))
        for _ in range(rng.randrange(1, 4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        decode(bytes(frame[: rng.randrange(1, len(frame) + 1)]))


@settings(max_examples=120, deadline=None)
@given(
    kind=st.sampled_from(sorted(m.REQUESTS)),
    request_id=st.integers(0, 2**63 - 1) | plain,
    values=st.dictionaries(st.sampled_from(FIELDS), plain),
)
def test_any_values_in_any_fields(kind, request_id, values):
    made = decode(msgpack.packb({"v": 1, "t": kind, **values, "id": request_id}))
    assert made is None or made.id == request_id


@settings(max_examples=60, deadline=None)
@given(values=st.dictionaries(st.sampled_from(["stop", "logit_bias", "seed", "top_p"]), plain))
def test_any_values_in_sampling(values):
    decode(msgpack.packb({"v": 1, "t": "generate", "id": 1, "prompt": "x", "sampling": values}))


def test_known_junk():
    head = msgpack.packb({"v": 1, "t": "generate", "id": 1, "prompt": "x"})
    for junk in [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x81" * 5000,
        b"\x91" * 5000,
        (b"\xdc\xff\xff" * 1000),
        b"\x81\xc3\x01",
        b"\x81\x90\x01",
        b"\x81\xcb" + struct.pack(">d", float("nan")) + b"\x01",
        b"\xa2\xff\xfe",
        b"\xc1",
        head[:-1],
        head + b"\x00",
        msgpack.packb({"v": 1, "t": "stats", "id": 1, "x": msgpack.ExtType(1, b"cos")}),
        msgpack.packb({"v": 1, "t": "stats", "id": 1, "x": msgpack.ExtType(127, b"")}),
        msgpack.packb({"v": 1, "t": "stats", "id": 1, "x": msgpack.Timestamp(1, 2)}),
    ]:
        assert decode(junk) is None
    assert decode() is None


@settings(max_examples=80, deadline=None)
@given(frame=st.binary(max_size=60) | plain.map(lambda v: msgpack.packb({"v": 1, "t": v, "id": 1})))
def test_replies_raise_only_protocol_violations(frame):
    with contextlib.suppress(ProtocolViolation):
        decode_reply([frame])
