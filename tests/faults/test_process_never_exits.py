"""A peer that is gone holds up no exit: every socket has its linger before it is bound."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from sessionkv import EngineConfig, LimitsConfig, launch
from sessionkv.errors import ConnectionLost, EngineClosed
from tests.builders.doors import Hold
from tests.builders.engine import engine_config, greedy, open_engine
from tests.builders.fake_engine import FakeEngine, short_endpoint
from tests.builders.processes import tampered_start, wait_for_file
from tests.builders.wire_client import WireClient

CLIENT_OF_A_DEAD_ENGINE = """
import socket, sys, threading
from sessionkv.client import Client
from sessionkv.ipc.endpoint import socket_path
listener = socket.socket(socket.AF_UNIX)        # accepts, and never says a word
listener.bind(str(socket_path(sys.argv[1])))
listener.listen()
client = Client(sys.argv[1])
stream = client.session("a").stream("x" * 1000)
"""
UNCLOSED_CLIENT = """
import sys
from sessionkv.client import Client
client = Client(sys.argv[1])
stream = client.session("a").stream("hold")
print(client.generate(prompt="bye").text)
"""
ENGINE_WITH_A_DEAD_CLIENT = """
import sys
import zmq
from sessionkv.config import LimitsConfig
from sessionkv.ipc.server import RouterServer
server = RouterServer(sys.argv[1], LimitsConfig())
context = zmq.Context()
dealer = context.socket(zmq.DEALER)
dealer.linger = 0
dealer.rcvhwm = 1
dealer.connect(sys.argv[1])
dealer.send(b"x")
((conn, _),) = server.poll(10)
for _ in range(100):
    server.send(conn, b"y" * 1_000_000)
server.close()
dealer.close()
context.term()
"""


def run(code: str, endpoint: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, endpoint],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("code", [CLIENT_OF_A_DEAD_ENGINE, ENGINE_WITH_A_DEAD_CLIENT])
def test_unsent_messages_do_not_hold_up_the_exit(code):
    with short_endpoint() as endpoint:
        run(code, endpoint)


def test_a_script_may_end_without_closing():
    with short_endpoint() as endpoint, FakeEngine(endpoint):
        assert run(UNCLOSED_CLIENT, endpoint) == "bye\n"


ABSENT = """
import sys
from sessionkv.client import Client
from sessionkv.errors import ConnectionLost
try:
    Client(sys.argv[1]).session("a").turn("x")
except ConnectionLost as error:
    print(error.code)
"""


def test_a_client_of_an_absent_engine_is_told_and_ends():
    with short_endpoint() as endpoint:
        assert run(ABSENT, endpoint) == "connection_lost\n"


def test_an_engine_with_a_dead_client_and_unsent_answers_ends_when_told_to():
    with launch("checksum") as engine, WireClient(engine.endpoint, rcvhwm=1) as dead:
        for i in range(6000):
            dead.send("list", 2 * i)
            dead.send("stats", 2 * i + 1)
        assert engine.client().generate(tokens=[1], sampling=greedy(2)).tokens
        engine._process.send_signal(signal.SIGTERM)
        assert engine._process.wait(10) == 0


def test_an_engine_with_a_turn_that_nobody_can_end_is_drained_in_time():
    config = EngineConfig(model="checksum", limits=LimitsConfig(drain_s=0.5))
    with launch(config=config) as engine:
        client = engine.client()
        stream = client.open("a").stream("x", sampling=greedy(None))
        next(stream)
        engine._process.send_signal(signal.SIGTERM)
        assert engine._process.wait(10) == 0
        with pytest.raises((ConnectionLost, EngineClosed)):
            list(stream)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_engine_that_is_still_loading_ends_when_told_to(tmp_path, monkeypatch, number):
    monkeypatch.setenv("PYTHONPATH", tampered_start(tmp_path, "hang"))
    code = """
import pathlib, sys
sys.orig_argv.append("sessionkv.actor.child")
import sitecustomize
exec(pathlib.Path(sitecustomize.__file__).read_text())
from sessionkv.actor.serve import run_serve
from sessionkv.config import EngineConfig
sys.exit(run_serve(EngineConfig(model="checksum"), sys.argv[1]))
"""
    with short_endpoint() as endpoint:
        child = subprocess.Popen([sys.executable, "-c", code, endpoint])
        wait_for_file(tmp_path / "loading")
        child.send_signal(number)
        assert child.wait(10) == 128 + number


def test_closing_an_embedded_engine_waits_for_no_turn_of_its_only_client():
    config = engine_config(blocks=16_384, limits=LimitsConfig(drain_s=10**6))
    hold = Hold()
    with open_engine(config, gate=hold.gate, runner={"script": hold.script}) as engine:
        stream = engine.open("a").stream("x", sampling=greedy(None))
        next(stream)
    hold.release()
    with pytest.raises(EngineClosed):
        list(stream)
