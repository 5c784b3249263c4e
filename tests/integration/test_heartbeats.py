"""Who is taken for gone: a client that is silent, not one that waited while the engine was busy."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sessionkv import LimitsConfig, launch
from sessionkv.ipc import messages as m
from tests.builders.engine import SocketEngine, engine_config, socket_engine
from tests.builders.fake_engine import short_endpoint
from tests.builders.processes import front_of, script
from tests.builders.wire_client import WireClient

BEATS = LimitsConfig(heartbeat_s=0.1, missed_heartbeats=3)
SILENCE_S = 0.3
# For processes that go on one after the other, when the machine lets them.
SLOW_BEATS = LimitsConfig(heartbeat_s=0.4, missed_heartbeats=3)
LONG_SILENCE_S = 1.2
STREAMING = """
import sys
from sessionkv import Client, SamplingParams
with Client(sys.argv[1]) as client:
    sampling = SamplingParams(max_tokens=3000, ignore_eos=True)
    for event in client.stream_generate("a", sampling=sampling):
        if event.offset == 0:
            print("streaming", flush=True)
        if event.result is not None:
            print(event.result.finish_reason.value, len(event.result.tokens))
"""


@pytest.fixture
def engine() -> Iterator[SocketEngine]:
    with short_endpoint() as endpoint:
        folder = Path(endpoint.removeprefix("ipc://")).parent
        with socket_engine(folder, engine_config(limits=BEATS)) as engine:
            yield engine


def test_welcome_says_how_often(engine: SocketEngine) -> None:
    with WireClient(engine.endpoint) as client:
        assert client.welcome is not None
        assert client.welcome["limits"]["heartbeat_s"] == 0.1
        assert client.welcome["limits"]["missed_heartbeats"] == 3


def test_a_silent_client_is_forgotten_and_told_so(engine: SocketEngine) -> None:
    with WireClient(engine.endpoint) as client:
        while engine.loop._peers:
            pass
        assert client.call("stats", 1)["code"] == "connection_lost"
        assert client.call("ping", 2)["code"] == "connection_lost"
        assert client.call("hello", 3)["t"] == "welcome"
        assert client.call("stats", 4)["t"] == "result"


def test_any_message_is_a_sign_of_life(engine: SocketEngine) -> None:
    with WireClient(engine.endpoint) as client:
        end = time.monotonic() + 3 * SILENCE_S
        number = 1
        while time.monotonic() < end:
            assert client.call("stats", number)["t"] == "result"
            number += 1


def test_a_busy_engine_takes_nobody_for_gone_who_spoke_meanwhile(engine: SocketEngine) -> None:
    """Several silences long one request keeps the thread that listens."""
    busy, done = threading.Event(), threading.Event()
    on_request = engine.loop._front.on_request

    def slow(connection: bytes, request: m.Request) -> None:
        if isinstance(request, m.Info):
            busy.set()
            assert done.wait(30)
        on_request(connection, request)

    engine.loop._front.on_request = slow  # type: ignore[method-assign]
    with WireClient(engine.endpoint) as slow_one, WireClient(engine.endpoint) as other:
        slow_one.send("info", 1, session="a")
        assert busy.wait(30)
        heard = engine.loop._peers
        before = {connection: peer.heard_s for connection, peer in heard.items()}
        while time.monotonic() < max(before.values()) + 2 * SILENCE_S:
            for client in (other, slow_one):
                client.send("ping", 9)
            time.sleep(0.01)  # only the clock can make a silence
        done.set()
        assert other.call("stats", 10)["t"] == "result"
        assert slow_one.until(1)[-1]["code"] == "session_not_found"


def test_a_machine_that_stood_still_parts_nobody() -> None:
    """Stopped together and continued, as when a laptop sleeps: the stream goes on."""
    with (
        launch(config=engine_config(limits=SLOW_BEATS, blocks=1024)) as engine,
        script(STREAMING, engine.endpoint) as client,
    ):
        assert client.stdout is not None
        assert client.stdout.readline() == "streaming\n"
        pids = (client.pid, engine.pid, front_of(engine.pid))
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2 * LONG_SILENCE_S)  # only the clock can make a silence
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert client.communicate(timeout=60)[0] == "length 3000\n"


def test_a_core_that_stands_still_is_an_engine_that_stands_still() -> None:
    """The front has a process of its own, and is not to say that the engine is alive."""
    limits = LimitsConfig(heartbeat_s=0.2, missed_heartbeats=3)
    with (
        launch(config=engine_config(limits=limits)) as engine,
        WireClient(engine.endpoint) as client,
    ):
        assert client.call("info", 1, session="a")["code"] == "session_not_found"
        os.kill(engine.pid, signal.SIGSTOP)
        time.sleep(4 * 0.2)  # only the clock can make a silence; it is the client's as well
        for number in range(2, 6):
            client.send("ping", number)
        client.send("info", 6, session="a")
        assert not client.socket.poll(600)
        os.kill(engine.pid, signal.SIGCONT)
        assert client.until(6)[-1]["code"] == "session_not_found"
