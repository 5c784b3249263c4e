"""Cancelling what has not started, has ended, was cancelled or is another's is always benign."""

from pathlib import Path

import pytest

from tests.builders.checksum import tokens
from tests.builders.engine import GREEDY, engine_config, greedy, open_engine, oracle, socket_engine
from tests.builders.fake_engine import short_endpoint
from tests.builders.wire_client import WireClient


def test_cancels_that_find_nothing_are_answered():
    with short_endpoint() as endpoint:
        folder = Path(endpoint.removeprefix("ipc://")).parent
        with (
            socket_engine(folder) as engine,
            WireClient(engine.endpoint) as one,
            WireClient(engine.endpoint) as two,
        ):
            assert one.call("cancel", 1, request=99)["value"] == {"found": False}
            assert one.call("cancel", 2, request=2)["value"] == {"found": False}
            one.call("open", 3, session="a")
            turn = {"session": "a", "tokens": [1], "sampling": {"temperature": 0}}
            one.send("turn", 4, **turn)
            # Another connection has request ids of its own.
            assert two.call("cancel", 4, request=4)["value"] == {"found": False}
            for keep in (False, True, False):
                one.send("cancel", 5, request=4, keep=keep)
            replies = [one.receive() for _ in range(4)]
            ends = [r for r in replies if r["id"] == 4]
            assert len(ends) == 1
            assert [r["t"] for r in replies if r["id"] == 5] == ["result"] * 3
            assert one.call("cancel", 6, request=4)["value"] == {"found": False}
            assert one.call("turn", 4, **turn)["t"] == "done"


@pytest.mark.parametrize("keep", [True, False])
def test_two_hundred_starts_and_cancels_leave_nothing(keep):
    with open_engine(engine_config(blocks=256)) as engine:
        session = engine.open("a")
        log: list[int] = []
        for i in range(200):
            stream = session.stream(tokens=[i], sampling=greedy(40))
            result = stream.cancel(keep=keep)
            if result is not None:
                log += [i, *result.tokens]
                session.rewind()
                log = []
        assert session.info().turns == 0
        assert list(session.turn(tokens=tokens(9), sampling=GREEDY).tokens) == oracle(tokens(9))
        engine.assert_ledger()
