"""A second engine on one path is refused with the first one's pid; a killed one leaves no trace."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sessionkv import launch
from sessionkv.client import Client
from sessionkv.config import LimitsConfig
from sessionkv.errors import EngineRunning
from sessionkv.ipc.endpoint import socket_path
from sessionkv.ipc.server import RouterServer
from tests.builders.engine import greedy
from tests.builders.fake_engine import FakeEngine, short_endpoint

CHILD = """
import sys
from sessionkv.config import LimitsConfig
from sessionkv.ipc.server import RouterServer
server = RouterServer(sys.argv[1], LimitsConfig())
print("up", flush=True)
sys.stdin.read()
"""


def start_child(endpoint: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, endpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "up\n"
    return child


def test_a_second_engine_is_refused_and_a_killed_one_is_replaced():
    with short_endpoint() as endpoint:
        child = start_child(endpoint)
        with pytest.raises(EngineRunning, match=f"pid {child.pid}") as caught:
            RouterServer(endpoint, LimitsConfig())
        assert caught.value.details["pid"] == child.pid
        assert socket_path(endpoint).exists()
        child.kill()
        child.communicate()
        assert socket_path(endpoint).exists()
        with FakeEngine(endpoint), Client(endpoint) as client:
            assert client.generate(prompt="replaced").text == "replaced"


def test_the_refused_engine_does_not_disturb_the_first():
    with short_endpoint() as endpoint, FakeEngine(endpoint), Client(endpoint) as client:
        with pytest.raises(EngineRunning):
            RouterServer(endpoint, LimitsConfig())
        assert client.generate(prompt="undisturbed").text == "undisturbed"
        with Client(endpoint) as late:
            assert late.generate(prompt="late").text == "late"


def test_of_two_launched_engines_the_second_is_refused_and_a_killed_one_replaced():
    with short_endpoint() as endpoint:
        with launch("checksum", endpoint=endpoint) as first:
            with pytest.raises(EngineRunning) as caught:
                launch("checksum", endpoint=endpoint)
            assert caught.value.details["pid"] == first.pid
            client = first.client()
            assert client.generate(tokens=[1], sampling=greedy(2)).tokens
            first.kill()
        with launch("checksum", endpoint=endpoint) as second, Client(endpoint) as client:
            assert client.generate(tokens=[1], sampling=greedy(2)).tokens
            assert second.pid != first.pid
