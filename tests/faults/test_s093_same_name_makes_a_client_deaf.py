"""Clients are told apart by their connection, whatever they call themselves."""

from __future__ import annotations

import subprocess
import sys

from sessionkv.client import Client
from sessionkv.ipc import messages as m
from sessionkv.ipc.connection import SocketTransport
from tests.builders.fake_engine import FakeEngine, short_endpoint

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
