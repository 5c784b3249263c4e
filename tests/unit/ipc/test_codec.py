from __future__ import annotations

import struct
from typing import Any

import msgpack
import pytest

from sessionkv.config import LimitsConfig
from sessionkv.errors import InvalidRequest, ProtocolViolation, RequestError
from sessionkv.ipc import messages as m
from sessionkv.ipc.codec import decode_reply, decode_request, encode_reply, encode_request
from sessionkv.ipc.limits import MAX_ARRAY, MAX_ITEMS, MAX_MAP
from sessionkv.types import SamplingParams
from sessionkv.types.portable import PortableSession
from tests.builders.store import node

LIMITS = LimitsConfig()

REQUESTS = [
    m.Hello(0, client="me", key="k"),
    m.Ping(2**63 - 1, consumed=7),
    m.Bye(1),
    m.Open(2, session="a", system="s", tools=({"name": "f"},), history="follow"),
    m.Turn(3, session="ä", text="", stream=True, when_busy="queue", priority=-3),
    m.Turn(
        4,
        session="a",
        messages=({"role": "user", "content": [{"type": "text", "text": "x"}]},),
        idempotency_key="k",
        deadline_s=1.5,
        attempt=2,
        metadata={"a": [1, None], "b": {"c": "ä"}},
    ),
    m.Turn(5, session="a", tokens=(0, 1, 2**32 - 1)),
    m.Generate(6, prompt="p", cache=False, sampling=SamplingParams(temperature=0.0, stop=("x",))),
    m.Count(40, messages=({"role": "user", "content": "x"},), tools=({"name": "f"},)),
    m.Pieces(41, tokens=(1, 2)),
    m.Generate(7, tokens=(1,), sampling=SamplingParams(logit_bias={5: -1.5}, seed=2**64 - 1)),
    m.Cancel(8, request=3, keep=True),
    m.Fork(9, session="a", name="b", node="12"),
    m.Rename(9, session="a", name="b"),
    m.Rewind(10, session="a", turns=2),
    m.Pin(11, session="a", tier="disk", ttl_s=60.0, priority=1),
    m.Unpin(12, session="a"),
    m.Info(13, session="a", history=True),
    m.Places(21, session="a"),
    m.Node(20, session="a", node="n-3", path=True),
    m.Close(14, session="a", keep=False),
    m.List(15, prefix="a", after="ab", limit=5),
    m.Flush(16),
    m.Stats(17),
    m.Export(18, session="a", nodes=(1, 2**63 - 1)),
    m.Import(
        19,
        nodes=(node(1), node(2, 1, tokenizer_digest="t", incoming_blob=b"\xff")),
        sessions=(PortableSession("a", 2, "keep", 1.0, 2.5),),
        commit=True,
    ),
]
REPLIES = [
    m.Welcome(0, engine="e", pid=3, limits={"depth": 32}),
    m.Result(1, {"a": [1, None]}),
    m.Progress(
        2, attempt=2, prompt_tokens=9, device_tokens=4, host_tokens=2, disk_tokens=1, done_tokens=5
    ),
    m.Delta(2, attempt=2, offset=3, tokens=[4], text="ü", logprobs=[[[4, -0.5], [5, -1.0]]]),
    m.Restarted(3, attempt=4),
    m.Done(4, node="9", text="t", tokens=[1, 2], stop="x", usage={"prompt_tokens": 1}),
    m.Failure(-1, code="protocol_violation", message="m", details={"a": 1}),
]


def frame(**values: Any) -> bytes:
    return msgpack.packb({"v": 1, "id": 5, **values})


def refused(*frames: bytes, limits: LimitsConfig = LIMITS) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode_request(frames, limits)
    return caught.value


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: f"{r.TYPE}-{r.id}")
def test_every_request_survives_the_way(request_):
    assert decode_request([encode_request(request_, LIMITS)], LIMITS) == request_


@pytest.mark.parametrize("reply", REPLIES, ids=lambda r: r.TYPE)
def test_every_reply_survives_the_way(reply):
    assert decode_reply([encode_reply(reply)]) == reply


def test_the_tables_above_cover_every_type():
    assert {r.TYPE for r in REQUESTS} == set(m.REQUESTS)
    assert {r.TYPE for r in REPLIES} == set(m.REPLIES)


def test_a_request_in_bytes():
    turn = m.Turn(5, session="a", tokens=(1, 258))
    expected = {"v": 1, "t": "turn", "id": 5, "session": "a", "tokens": b"\1\0\0\0\2\1\0\0"}
    assert msgpack.unpackb(encode_request(turn, LIMITS)) == expected


def test_tokens_as_array_and_as_binary_are_the_same():
    as_array = decode_request([frame(t="turn", session="a", tokens=[7, 70000])], LIMITS)
    packed = struct.pack("<2I", 7, 70000)
    as_binary = decode_request([frame(t="turn", session="a", tokens=packed)], LIMITS)
    assert as_array == as_binary
    assert as_binary.tokens == (7, 70000)


def test_logit_bias_keys_as_integers_and_as_strings():
    for bias in ({5: 1.0, 70: -2}, {"5": 1.0, "70": -2}):
        made = decode_request(
            [frame(t="generate", prompt="x", sampling={"logit_bias": bias})], LIMITS
        )
        assert made.sampling.logit_bias == {5: 1.0, 70: -2}


def test_unknown_fields_are_ignored_also_in_sampling():
    made = decode_request(
        [frame(t="generate", prompt="x", shiny=[1, {"a": 2}], sampling={"new": 1, "top_k": 2})],
        LIMITS,
    )
    assert made == m.Generate(5, prompt="x", sampling=SamplingParams(top_k=2))


def test_null_means_absent():
    made = decode_request(
        [frame(t="turn", session="a", text="x", tokens=None, priority=None, sampling=None)], LIMITS
    )
    assert made == m.Turn(5, session="a", text="x")


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"t": "turn", "text": "x"}, "session"),
        ({"t": "turn", "session": "", "text": "x"}, "session"),
        ({"t": "turn", "session": "a\0", "text": "x"}, "session"),
        ({"t": "turn", "session": "ä" * 2049, "text": "x"}, "session"),
        ({"t": "turn", "session": b"a", "text": "x"}, "session"),
        ({"t": "turn", "session": "a"}, "text | messages | tokens"),
        ({"t": "turn", "session": "a", "text": "x", "tokens": [1]}, "text | messages | tokens"),
        ({"t": "turn", "session": "a", "text": 5}, "text"),
        ({"t": "turn", "session": "a", "tokens": []}, "tokens"),
        ({"t": "turn", "session": "a", "tokens": b"123"}, "tokens"),
        ({"t": "turn", "session": "a", "tokens": [1, -1]}, "tokens[1]"),
        ({"t": "turn", "session": "a", "tokens": [1, True]}, "tokens[1]"),
        ({"t": "turn", "session": "a", "tokens": [1.0]}, "tokens[0]"),
        ({"t": "turn", "session": "a", "messages": []}, "messages"),
        ({"t": "turn", "session": "a", "messages": [5]}, "messages[0]"),
        ({"t": "turn", "session": "a", "messages": [{"content": "x"}]}, "messages[0].role"),
        (
            {"t": "turn", "session": "a", "messages": [{"role": "user", "content": 5}]},
            "messages[0].content",
        ),
        (
            {
                "t": "turn",
                "session": "a",
                "messages": [{"role": "user", "content": [{"type": "image"}]}],
            },
            "messages[0].content[0].type",
        ),
        (
            {"t": "turn", "session": "a", "messages": [{"role": "user", "x": {"y": [b"z"]}}]},
            "messages[0].x.y[0]",
        ),
        (
            {"t": "turn", "session": "a", "messages": [{"role": "user", "x": float("nan")}]},
            "messages[0].x",
        ),
        ({"t": "turn", "session": "a", "text": "x", "when_busy": "wait"}, "when_busy"),
        ({"t": "turn", "session": "a", "text": "x", "stream": 1}, "stream"),
        ({"t": "turn", "session": "a", "text": "x", "deadline_s": 0}, "deadline_s"),
        ({"t": "turn", "session": "a", "text": "x", "deadline_s": float("nan")}, "deadline_s"),
        ({"t": "turn", "session": "a", "text": "x", "priority": 101}, "priority"),
        ({"t": "turn", "session": "a", "text": "x", "idempotency_key": ""}, "idempotency_key"),
        ({"t": "turn", "session": "a", "text": "x", "sampling": 1}, "sampling"),
        (
            {"t": "turn", "session": "a", "text": "x", "sampling": {"top_p": 2}},
            "sampling.top_p",
        ),
        ({"t": "pin", "session": "a", "tier": "tape"}, "tier"),
        ({"t": "pin", "session": "a", "ttl_s": True}, "ttl_s"),
        ({"t": "rewind", "session": "a", "turns": 0}, "turns"),
        ({"t": "fork", "session": "a"}, "name"),
        ({"t": "list", "limit": 0}, "limit"),
        ({"t": "open", "session": "a", "tools": {"a": 1}}, "tools"),
        ({"t": "open", "session": "a", "history": "forget"}, "history"),
        ({"t": "cancel"}, "request"),
    ],
)
def test_a_bad_field_is_named(values, field):
    error = refused(frame(**values))
    assert isinstance(error, InvalidRequest)
    assert error.details["field"] == field
    assert error.request_id == 5


@pytest.mark.parametrize("bad_id", [None, -1, 2**63, 1.0, "1", True])
def test_a_bad_id_is_refused_without_one(bad_id):
    error = refused(msgpack.packb({"v": 1, "t": "stats", "id": bad_id}))
    assert error.request_id == -1


@pytest.mark.parametrize("version", [None, 0, 2, "1", True, 1.0, [1]])
def test_another_protocol_version_is_named(version):
    error = refused(msgpack.packb({"v": version, "t": "stats", "id": 3}))
    assert isinstance(error, ProtocolViolation)
    assert error.details["supported"] == [1]
    assert error.request_id == 3


@pytest.mark.parametrize("version", [2, True])
def test_a_hello_of_another_version_is_refused(version):
    assert isinstance(refused(frame(t="hello", version=version)), ProtocolViolation)


@pytest.mark.parametrize("kind", [None, "", "exec", 5, ["turn"], {"turn": 1}])
def test_an_unknown_type_is_an_answer_with_its_id(kind):
    error = refused(frame(t=kind))
    assert isinstance(error, ProtocolViolation)
    assert error.request_id == 5


@pytest.mark.parametrize("count", [0, 2, 3])
def test_a_message_has_exactly_one_frame(count):
    assert isinstance(refused(*[frame(t="stats")] * count), ProtocolViolation)


def test_a_frame_over_the_limit_is_refused_with_both_numbers():
    small = LimitsConfig(frame_bytes=2**14)
    error = refused(frame(t="generate", prompt="x" * 2**14), limits=small)
    assert error.details["allowed_bytes"] == 2**14


def nested(levels: int) -> bytes:
    return b"\x91" * (levels - 1) + b"\x90"


def test_depth_is_bounded_in_known_and_unknown_fields():
    head = b"\x84\xa1v\x01\xa1t\xa5stats\xa2id\x05\xa1x"
    assert decode_request([head + nested(31)], LIMITS) == m.Stats(5)
    assert isinstance(refused(head + nested(32)), ProtocolViolation)
    assert isinstance(refused(head + nested(900)), ProtocolViolation)
    assert isinstance(refused(head + nested(5000)), ProtocolViolation)


def test_decoded_size_is_bounded():
    prompt = {"t": "generate", "prompt": "x"}
    refused(frame(**prompt, x=[0] * (MAX_ARRAY + 1)))
    refused(frame(**prompt, x={str(i): 0 for i in range(MAX_MAP + 1)}))
    refused(frame(**prompt, x=[[0] * (MAX_ARRAY - 1)] * (MAX_ITEMS // MAX_ARRAY)))
    many_lists = b"\x85\xa1v\x01\xa1t\xa5stats\xa2id\x05\xa1x" + b"\xdc\xff\xff" + b"\x90" * 65535
    decode_request([b"\x84" + many_lists[1:]], LIMITS)


def test_an_array_that_is_too_long_is_answered_under_the_requests_own_id():
    tokens = [0] * (MAX_ARRAY + 1)
    error = refused(frame(t="turn", session="a", x=[{"y": [1]}], tokens=tokens))
    assert isinstance(error, InvalidRequest)
    assert error.request_id == 5
    assert error.details["field"] == "tokens"
    assert f"{MAX_ARRAY + 1} entries long" in error.message
    assert f"at most {MAX_ARRAY} " in error.message
    whole = frame(t="turn", tokens=tokens)
    assert refused(whole[:-1]).request_id == -1  # broken: nothing in it is to be trusted
    assert refused(whole + b"\0").request_id == -1
    inside = refused(frame(t="turn", messages=[tokens]))
    assert isinstance(inside, ProtocolViolation)
    assert inside.request_id == 5


def test_a_long_token_list_goes_as_binary():
    tokens = tuple(range(MAX_ARRAY + 1))
    made = decode_request([encode_request(m.Generate(5, tokens=tokens), LIMITS)], LIMITS)
    assert made.tokens == tokens


def test_a_key_given_twice_is_refused():
    twice = b"\x84\xa1v\x01\xa1t\xa5stats\xa2id\x05\xa2id\x06"
    assert "twice" in refused(twice).message


def test_encoding_refuses_what_cannot_be_sent_and_names_it():
    for request, field in [
        (m.Turn(1, session="a\ud800", text="x"), "session"),
        (m.Turn(1, session="a", text="x\udfff"), "text"),
        (m.Turn(1, session="a", messages=[{"role": "user", "content": "\ud800"}]),
         "messages[0].content"),
        (m.Turn(1, session="a", messages=[{"role": "user", "\ud800": 1}]), "messages[0].\\ud800"),
        (m.Turn(1, session="a", text="x", idempotency_key="\ud800"), "idempotency_key"),
        (m.Turn(1, session="a", tokens=[1, -5]), "tokens[1]"),
        (m.Turn(1, session="a", tokens=[1, 2**32]), "tokens[1]"),
        (m.Turn(1, session="a", messages=[{"role": "user", "x": object()}]), "messages[0].x"),
        (m.Turn(1, session="a", messages=[{"role": "user", "x": 2**70}]), "messages[0].x"),
        (m.Open(1, session="a", tools=[{"f": {1, 2}}]), "tools[0].f"),
    ]:  # fmt: skip
        with pytest.raises(InvalidRequest) as caught:
            encode_request(request, LIMITS)
        assert caught.value.details["field"] == field


def test_encoding_refuses_a_frame_over_the_limit():
    with pytest.raises(InvalidRequest, match="at most 16384 bytes"):
        encode_request(m.Generate(1, prompt="x" * 2**14), LimitsConfig(frame_bytes=2**14))


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [msgpack.packb([1])],
        [msgpack.packb({"v": 2, "t": "result", "id": 1})],
        [msgpack.packb({"v": 1, "t": "news", "id": 1})],
        [msgpack.packb({"v": 1, "t": ["result"], "id": 1})],
        [msgpack.packb({"v": 1, "t": "result"})],
        [msgpack.packb({"v": 1, "t": "result", "id": 1, "value": msgpack.ExtType(1, b"x")})],
        [msgpack.packb({"v": 1, "t": "result", "id": 1})] * 2,
    ],
)
def test_a_reply_that_is_none_is_refused(frames):
    with pytest.raises(ProtocolViolation):
        decode_reply(frames)


def test_a_reply_may_have_new_fields():
    reply = msgpack.packb({"v": 1, "t": "restarted", "id": 1, "attempt": 3, "why": "new"})
    assert decode_reply([reply]) == m.Restarted(1, attempt=3)
