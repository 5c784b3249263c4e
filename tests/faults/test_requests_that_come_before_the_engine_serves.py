"""Who asks while an engine starts is answered when it has: nothing said meanwhile is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from sessionkv import launch
from sessionkv.ipc.endpoint import socket_path
from tests.builders.doors import Later
from tests.builders.engine import greedy, oracle
from tests.builders.fake_engine import short_endpoint
from tests.builders.processes import held_load, patched_child, wait_for_file
from tests.builders.wire_client import WireClient

LATE = """
import pathlib, time
from sessionkv.ipc.frames import FrameSocket
receive = FrameSocket.receive

def late(frames):
    FrameSocket.receive = receive
    while not pathlib.Path({go!r}).exists():
        time.sleep(0.01)
    return receive(frames)

FrameSocket.receive = late
"""
"""Core reads nothing of its front, not even that it has started, before a file is there."""
TURN = {"session": "a", "tokens": [1, 2], "sampling": {"temperature": 0, "ignore_eos": True}}


def ask(client: WireClient) -> None:
    client.send("open", 1, session="a")
    client.send("turn", 2, **TURN | {"sampling": TURN["sampling"] | {"max_tokens": 8}})


def assert_answered(client: WireClient) -> None:
    opened, done = client.receive(), client.receive()
    assert [(r["id"], r["t"]) for r in (opened, done)] == [(1, "result"), (2, "done")]
    assert done["tokens"] == oracle([1, 2], greedy(8))
    assert client.call("info", 3, session="a")["value"]["turns"] == 1


def test_while_the_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket listens, and nobody reads it."""
    monkeypatch.setenv("PYTHONPATH", held_load(tmp_path))
    with short_endpoint() as endpoint:
        starting = Later(lambda: launch("checksum", endpoint=endpoint))
        wait_for_file(tmp_path / "loading")
        with WireClient(endpoint, hello=False) as client:
            client.send("hello", 0)
            ask(client)
            (tmp_path / "go").touch()
            with starting.result():
                assert client.receive()["t"] == "welcome"
                assert_answered(client)


def test_when_the_front_serves_and_core_has_not_heard_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests lie right behind the front's first word, and are read with it."""
    go = tmp_path / "go"
    monkeypatch.setenv("PYTHONPATH", patched_child(tmp_path, LATE.format(go=str(go))))
    with short_endpoint() as endpoint:
        starting = Later(lambda: launch("checksum", endpoint=endpoint))
        wait_for_file(socket_path(endpoint))
        with WireClient(endpoint) as client:
            ask(client)
            # The front answers this itself, after it has passed on what came before.
            assert client.call("nothing", 9)["code"] == "protocol_violation"
            assert not starting.done
            go.touch()
            with starting.result():
                assert_answered(client)
