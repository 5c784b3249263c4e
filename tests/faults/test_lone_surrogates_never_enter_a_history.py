"""A lone surrogate cannot be stored or sent; it is refused where it comes in."""

from pathlib import Path

import msgpack
import pytest

from sessionkv import Client
from sessionkv.errors import InvalidRequest
from sessionkv.text.messages import dump_messages
from sessionkv.types import MissReason
from tests.builders import text as built
from tests.builders.engine import greedy, open_engine, socket_engine
from tests.builders.fake_engine import short_endpoint
from tests.builders.wire_client import WireClient


def test_turn_with_a_lone_surrogate_is_refused_and_the_next_one_works():
    text = built.chatml()
    root = text.root(None, None, now_s=0.0)
    log = text.delta(root, built.read("fine"), first=True, closed=False)
    with pytest.raises(InvalidRequest) as caught:
        built.read("ok\ud83d")
    assert caught.value.details["field"] == "messages[0].content"
    assert dump_messages(built.read("clean"))
    log += text.delta(root, built.read("clean"), first=False, closed=False)
    assert text.decode(log).count("clean") == 1


def test_whole_pairs_are_ordinary_text():
    assert built.read("ok\U0001f600")[0].content == "ok\U0001f600"


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "ok\ud83d"},
        {"messages": [{"role": "user", "content": "ok\ud83d"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "ok\ud83d"}]}]},
        {"messages": [{"role": "user", "content": "ok", "na\ud83d": 1}]},
        {"text": "ok", "idempotency_key": "\ud83d"},
    ],
)
def test_an_engines_session_is_intact_after_a_refused_turn(fields):
    with open_engine() as engine:
        session = engine.open("a")
        session.turn("one", sampling=greedy(4))
        before = session.info(history=True)
        with pytest.raises(InvalidRequest):
            session.turn(**fields)
        with pytest.raises(InvalidRequest):
            engine.generate("ok\ud83d")
        with pytest.raises(InvalidRequest):
            engine.open("b", system="\ud83d")
        assert session.info(history=True) == before
        result = session.turn("three", sampling=greedy(4))
        assert result.cache.miss.reason is MissReason.NONE
        assert [m["content"] for m in session.info(history=True).messages][::2] == ["one", "three"]


def test_surrogates_forced_onto_the_wire_are_refused_there():
    with short_endpoint() as endpoint:
        folder = Path(endpoint.removeprefix("ipc://")).parent
        with socket_engine(folder) as engine, WireClient(engine.endpoint) as wire:
            wire.call("open", 1, session="a")
            turn = {"v": 1, "t": "turn", "id": 2, "session": "a", "text": "ok\ud83d"}
            wire.socket.send(msgpack.packb(turn, unicode_errors="surrogatepass"))
            assert wire.until(2)[-1]["code"] == "protocol_violation"
            with Client(engine.endpoint) as client:
                assert client.session("a").turn("fine", sampling=greedy(2)).tokens
                assert client.session("a").info().turns == 1
