"""Clients are told apart by their connection, whatever they call themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import zmq

from sessionkv.client import Client
from sessionkv.ipc import messages as m
from sessionkv.ipc.connection import SocketTransport
from tests.builders.engine import engine_config, greedy, oracle, socket_engine
from tests.builders.fake_engine import FakeEngine, short_endpoint
from tests.builders.processes import script

CHILD = """
import sys
from sessionkv.client import Client
from sessionkv.ipc.connection import SocketTransport
client = Client(transport=SocketTransport(sys.argv[1], client="C"))
print(client.generate(prompt="up").text, flush=True)
client.generate(prompt="hold")
"""


def test_two_clients_of_one_name_are_both_served():
    with short_endpoint() as endpoint, FakeEngine(endpoint) as engine:
        first = Client(transport=SocketTransport(endpoint, client="C"))
        second = Client(transport=SocketTransport(endpoint, client="C"))
        for _ in range(5):
            assert first.generate(prompt="1").text == "1"
            assert second.generate(prompt="2").text == "2"
        hellos = engine.wait_for(m.Hello, 2)
        assert [r.client for _, r in hellos] == ["C", "C"]
        assert len({conn for conn, _ in hellos}) == 2
        first.close()
        second.close()


def test_a_killed_client_may_come_back_at_once_under_its_name():
    with short_endpoint() as endpoint, FakeEngine(endpoint):
        for _ in range(2):
            child = subprocess.Popen(
                [sys.executable, "-c", CHILD, endpoint], stdout=subprocess.PIPE, text=True
            )
            assert child.stdout.readline() == "up\n"
            child.kill()
            child.wait()
            child.stdout.close()


STREAMING = """
import sys
from sessionkv import SamplingParams
from sessionkv.client import Client
from sessionkv.ipc.connection import SocketTransport
client = Client(transport=SocketTransport(sys.argv[1], client="C"))
session = client.open("a")
stream = session.stream(tokens=[1], sampling=SamplingParams(ignore_eos=True))
next(stream)
print("streaming", flush=True)
for event in stream:
    pass
"""


def test_an_engine_serves_a_killed_clients_successor_and_its_session():
    with short_endpoint() as endpoint:
        folder = Path(endpoint.removeprefix("ipc://")).parent
        config = engine_config(blocks=16_384)
        with socket_engine(folder, config) as engine:
            for _ in range(2):
                with script(STREAMING, engine.endpoint) as child:
                    assert child.stdout.readline() == "streaming\n"
                    child.kill()
                    child.wait()
                client = Client(transport=SocketTransport(engine.endpoint, client="C"))
                result = client.session("a").turn(tokens=[2], sampling=greedy(4), when_busy="queue")
                assert list(result.tokens) == oracle([2], greedy(4))
                client.session("a").rewind()
                client.close()


def test_two_sockets_that_insist_on_one_identity_do_not_disturb_a_third():
    with short_endpoint() as endpoint:
        folder = Path(endpoint.removeprefix("ipc://")).parent
        with socket_engine(folder) as engine, Client(engine.endpoint) as client:
            context = zmq.Context()
            twins = [context.socket(zmq.DEALER) for _ in range(2)]
            for twin in twins:
                twin.linger = 0
                twin.routing_id = b"C"
                twin.connect(engine.endpoint)
                twin.send(b"\x83\xa1v\x01\xa1t\xa5hello\xa2id\x00")
            assert b"welcome" in twins[0].recv()
            assert client.generate(tokens=[1], sampling=greedy(2)).tokens
            for twin in twins:
                twin.close()
            context.term()
