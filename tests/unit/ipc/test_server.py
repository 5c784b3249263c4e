from __future__ import annotations

import threading
from collections.abc import Iterator
from socket import socketpair

import msgpack
import pytest
import zmq

from sessionkv.config import LimitsConfig
from sessionkv.errors import ConfigError, ConnectionLost
from sessionkv.ipc.server import RouterServer
from tests.builders.fake_engine import short_endpoint


@pytest.fixture
def endpoint() -> Iterator[str]:
    with short_endpoint() as endpoint:
        yield endpoint


@pytest.fixture
def dealers(endpoint: str) -> Iterator[list[zmq.Socket[bytes]]]:
    """Two plain sockets, connected once the server is there."""
    context = zmq.Context()
    sockets = [context.socket(zmq.DEALER) for _ in range(2)]
    for socket in sockets:
        socket.linger = 0
        socket.rcvtimeo = 10_000
        socket.connect(endpoint)
    yield sockets
    for socket in sockets:
        socket.close()
    context.term()


def collect(server: RouterServer, count: int) -> list[tuple[bytes, list[bytes]]]:
    got: list[tuple[bytes, list[bytes]]] = []
    while len(got) < count:
        batch = server.poll(10.0)
        assert batch, "nothing came"
        got += batch
    return got


def test_connections_are_told_apart_and_answered_apart(endpoint, dealers):
    with RouterServer(endpoint, LimitsConfig()) as server:
        for i, dealer in enumerate(dealers):
            dealer.send(b"hello %d" % i)
        by_text = {frames[0]: conn for conn, frames in collect(server, 2)}
        assert len(set(by_text.values())) == 2
        for text, conn in by_text.items():
            assert server.send(conn, text.upper())
        assert [d.recv() for d in dealers] == [b"HELLO 0", b"HELLO 1"]


def test_frames_of_a_message_come_as_they_are(endpoint, dealers):
    with RouterServer(endpoint, LimitsConfig()) as server:
        dealers[0].send_multipart([b"a", b"", b"c"])
        ((_, frames),) = collect(server, 1)
        assert frames == [b"a", b"", b"c"]


def test_a_batch_is_bounded_and_the_rest_comes_next(endpoint, dealers):
    with RouterServer(endpoint, LimitsConfig()) as server:
        for i in range(50):
            dealers[0].send(b"%d" % i)
        got: list[bytes] = []
        while len(got) < 50:
            batch = server.poll(10.0, max_messages=7)
            assert 0 < len(batch) <= 7
            got += [frames[0] for _, frames in batch]
        assert got == [b"%d" % i for i in range(50)]


class Waits:
    """Sees each wait of a server.

    Attributes:
        begins: Set when one is about to begin.
        ended_by: What the last one returned: descriptors with their events.
    """

    def __init__(self, server: RouterServer) -> None:
        self.begins = threading.Event()
        self.ended_by: dict[object, int] = {}
        self._poll = server._poller.poll
        server._poller.poll = self._wait

    def _wait(self, timeout_ms: int) -> list[tuple[object, int]]:
        self.begins.set()
        found = self._poll(timeout_ms)
        self.ended_by = dict(found)
        return found


def test_wake_ends_the_wait_also_when_it_came_first(endpoint):
    with RouterServer(endpoint, LimitsConfig()) as server:
        waits, by_wake = Waits(server), {server._waker.fd: zmq.POLLIN}
        server.wake()
        server.wake()
        assert server.poll(60.0) == []
        assert waits.ended_by == by_wake
        assert server.poll(0.0) == []
        assert waits.ended_by == {}
        waits.begins.clear()
        woken = threading.Event()

        def wake_the_sleeper() -> None:
            waits.begins.wait(30)
            woken.set()
            server.wake()

        waker = threading.Thread(target=wake_the_sleeper)
        waker.start()
        assert server.poll(60.0) == []
        assert woken.is_set()
        assert waits.ended_by == by_wake
        waker.join()
    server.wake()


def test_a_watched_descriptor_ends_the_wait_and_where_asked_also_when_it_has_room(endpoint):
    ours, theirs = socketpair()
    with ours, theirs, RouterServer(endpoint, LimitsConfig()) as server:
        waits = Waits(server)
        assert server.poll(0.0, for_room=True) == []
        assert waits.ended_by == {}  # of nothing watched
        server.watch(ours.fileno())
        assert server.poll(1000.0, for_room=True) == []
        assert waits.ended_by == {ours.fileno(): zmq.POLLOUT}
        server.wake()
        assert server.poll(1000.0) == []
        assert waits.ended_by == {server._waker.fd: zmq.POLLIN}  # room alone ends no other wait
        theirs.send(b"x")
        assert server.poll(1000.0) == []
        assert waits.ended_by == {ours.fileno(): zmq.POLLIN}
        assert server.poll(1000.0, for_room=True) == []
        assert waits.ended_by == {ours.fileno(): zmq.POLLIN | zmq.POLLOUT}


def test_a_peer_that_is_not_there_is_an_error_not_a_silence(endpoint):
    with RouterServer(endpoint, LimitsConfig()) as server, pytest.raises(ConnectionLost):
        server.send(b"nobody", b"x")


def test_a_full_connection_says_so_and_loses_nothing(endpoint, dealers):
    reader, idler = dealers
    with RouterServer(endpoint, LimitsConfig(), send_hwm=10) as server:
        reader.send(b"r")
        idler.send(b"i")
        conns = {frames[0]: conn for conn, frames in collect(server, 2)}
        payload = b"x" * 100_000
        sent = 0
        while server.send(conns[b"i"], payload):
            sent += 1
            assert sent < 100_000
        assert server.send(conns[b"r"], b"still served")
        assert reader.recv() == b"still served"
        for _ in range(sent):
            assert idler.recv() == payload


def test_a_frame_over_the_limit_comes_through_to_be_answered(endpoint, dealers):
    with RouterServer(endpoint, LimitsConfig(frame_bytes=20_000)) as server:
        dealers[0].send(b"x" * 140_000)
        ((_, frames),) = collect(server, 1)
        assert len(frames[0]) == 140_000


def test_a_frame_far_over_the_limit_cuts_its_connection_alone(endpoint, dealers):
    with RouterServer(endpoint, LimitsConfig(frame_bytes=20_000)) as server:
        dealers[0].send(b"x" * 180_000)
        dealers[1].send(msgpack.packb("ok"))
        ((_, frames),) = collect(server, 1)
        assert frames == [msgpack.packb("ok")]


def test_closing_twice_and_a_path_that_cannot_be_used(endpoint):
    server = RouterServer(endpoint, LimitsConfig())
    server.close()
    server.close()
    RouterServer(endpoint, LimitsConfig()).close()
    with pytest.raises(ConfigError):
        RouterServer("ipc:///proc/nowhere/engine.sock", LimitsConfig())
