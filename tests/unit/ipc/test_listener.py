"""An endpoint has one owner, whose clients may knock before anybody serves them."""

from __future__ import annotations

import os
import socket

import pytest

from sessionkv.errors import ConfigError, EngineRunning
from sessionkv.ipc.endpoint import is_listening, socket_path
from sessionkv.ipc.listener import Listener
from tests.builders.fake_engine import short_endpoint


def connect(endpoint: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.connect(os.fspath(socket_path(endpoint)))
    return client


def test_clients_may_connect_before_the_socket_is_taken_and_are_served_by_who_takes_it() -> None:
    with short_endpoint() as endpoint, Listener(endpoint) as listener:
        assert socket_path(endpoint).stat().st_mode & 0o777 == 0o600
        with connect(endpoint) as client, listener.take() as taken:
            client.sendall(b"early")
            served, _ = taken.accept()
            with served:
                assert served.recv(5) == b"early"


def test_the_socket_is_taken_once() -> None:
    with (
        short_endpoint() as endpoint,
        Listener(endpoint) as listener,
        listener.take(),
        pytest.raises(RuntimeError, match="was taken before"),
    ):
        listener.take()


def test_a_second_owner_is_refused_and_disturbs_nobody() -> None:
    with short_endpoint() as endpoint, Listener(endpoint):
        with pytest.raises(EngineRunning) as caught:
            Listener(endpoint)
        assert caught.value.details["pid"] == os.getpid()
        assert is_listening(endpoint)


def test_a_path_is_free_once_its_owner_is_closed_and_a_file_left_there_is_replaced() -> None:
    with short_endpoint() as endpoint:
        path = socket_path(endpoint)
        with Listener(endpoint):
            pass
        assert not path.exists()
        stale = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stale.bind(os.fspath(path))
        stale.close()
        assert not is_listening(endpoint)
        with Listener(endpoint):
            assert is_listening(endpoint)


def test_a_path_that_cannot_be_listened_at_is_free_again() -> None:
    with short_endpoint() as endpoint:
        path = socket_path(endpoint)
        path.mkdir(parents=True)
        with pytest.raises(ConfigError, match="a path to listen at"):
            Listener(endpoint)
        path.rmdir()
        with Listener(endpoint):
            assert is_listening(endpoint)
