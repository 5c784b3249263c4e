"""A peer that is gone holds up no exit: every socket has its linger before it is bound."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.builders.fake_engine import FakeEngine, short_endpoint

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
