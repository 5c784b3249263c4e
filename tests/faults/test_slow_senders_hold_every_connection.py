"""Clients that send by drips, or read nothing, hold a connection for a bounded time and number."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from sessionkv.gateway import connections, server
from sessionkv.gateway.app import create_app
from sessionkv.gateway.at_work import RequestShares
from sessionkv.gateway.connections import BoundedConfig, BoundedConnection, ConnectionBounds
from sessionkv.gateway.guard import TENANT
from sessionkv.gateway.settings import GatewaySettings
from tests.builders.engine import SocketEngine, StepGate, engine_config, socket_engine
from tests.builders.gateway import Gateway, gateway, http_engine

CHAT = "/v1/chat/completions"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
MODELS = HEALTH.replace(b"/health", b"/v1/models")
HEADERS = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: 5000\r\n\r\n"
)
BODY: dict[str, Any] = {
    "model": "checksum",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 4,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SocketEngine]:
    with socket_engine(tmp_path_factory.mktemp("e"), engine_config(blocks=256)) as served:
        yield served


def connected(served: Gateway, *, buffer: int | None = None) -> socket.socket:
    parts = urlsplit(served.url)
    sock = socket.socket()
    if buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.settimeout(30)
    sock.connect((parts.hostname, parts.port))
    return sock


def drips(sock: socket.socket, piece: bytes, every_s: float) -> bytes:
    """What comes until the other side closes, to whom ``piece`` is sent again and again."""
    found = b""
    sock.settimeout(every_s)
    while True:
        try:
            sock.sendall(piece)
            if not (part := sock.recv(65536)):
                return found
            found += part
        except TimeoutError:
            continue
        except OSError:  # closed while there was more to be sent
            return found


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def code(answer: bytes) -> str:
    return str(json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]["code"])


def rest(sock: socket.socket) -> bytes:
    with sock:
        return b"".join(iter(lambda: sock.recv(65536), b""))


def one_answer(sock: socket.socket) -> bytes:
    """Headers and body of an answer that says its length."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += sock.recv(65536)
    head, _, body = found.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += sock.recv(65536)
    return head + b"\r\n\r\n" + body


def test_headers_that_drip_are_given_up(engine: SocketEngine) -> None:
    with gateway(engine.endpoint, header_s=0.2) as served:
        with connected(served) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nx: ")
            answer = drips(sock, b"y", 0.02)
        assert (status(answer), code(answer)) == (408, "header_timeout")
        with connected(served) as sock:  # lines before a request are none of it
            assert drips(sock, b"\r\n", 0.02) == b""
        assert rest(connected(served)) == b""


def test_the_next_request_of_a_connection_is_bound_too(engine: SocketEngine) -> None:
    with gateway(engine.endpoint, header_s=0.2) as served, connected(served) as sock:
        sock.sendall(HEALTH)
        assert status(one_answer(sock)) == 200
        sock.sendall(HEALTH)
        assert status(one_answer(sock)) == 200
        sock.sendall(b"GET ")
        assert status(drips(sock, b"/", 0.02)) == 408


def test_headers_end_at_so_many_bytes(engine: SocketEngine) -> None:
    with gateway(engine.endpoint) as served, connected(served) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        answer = drips(sock, b"x-more: " + b"y" * 4000 + b"\r\n", 0.001)
    assert (status(answer), code(answer)) == (431, "headers_too_large")


def test_a_body_that_drips_is_given_up(engine: SocketEngine) -> None:
    # No pause is as long as the bound; all of them together are.
    with gateway(engine.endpoint, body_pause_s=0.3, body_bytes_per_s=1000) as served:
        with connected(served) as sock:
            sock.sendall(HEADERS)
            answer = drips(sock, b" ", 0.02)
        assert (status(answer), code(answer)) == (408, "body_timeout")
        assert b"1000 bytes a second" in answer


def test_a_body_that_comes_fast_enough_may_take_longer_than_a_pause(engine: SocketEngine) -> None:
    data = json.dumps(BODY).encode()
    pause_s = 1.5
    with (
        gateway(engine.endpoint, body_pause_s=pause_s, body_bytes_per_s=20) as served,
        connected(served) as sock,
    ):
        length = f"Content-Length: {len(data)}\r\nConnection: close"
        sock.sendall(HEADERS.replace(b"Content-Length: 5000", length.encode()))
        began = time.monotonic()
        for i in range(0, len(data), 10):
            sock.sendall(data[i : i + 10])
            time.sleep(0.2)
        assert time.monotonic() - began > pause_s
        assert status(rest(sock)) == 200


def test_idle_connections_end(engine: SocketEngine) -> None:
    with gateway(engine.endpoint, idle_s=0.05) as served, connected(served) as sock:
        sock.sendall(HEALTH)
        assert status(rest(sock)) == 200


def test_who_reads_nothing_is_cut_off(engine: SocketEngine) -> None:
    ask = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"

    def ask_on(sock: socket.socket) -> None:
        while True:  # far more answers than sockets and buffers hold
            sock.sendall(ask)

    with (
        gateway(engine.endpoint, unread_s=0.2) as served,
        connected(served, buffer=4096) as sock,
        pytest.raises(OSError, match=r"reset|Broken pipe"),
    ):
        ask_on(sock)


class TimersOnly:
    """A loop in which time passes when the test says so."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], object]]] = []

    def time(self) -> float:
        return 0.0

    def call_later(self, delay_s: float, what: Callable[..., object], *args: object) -> None:
        self.timers.append((delay_s, partial(what, *args)))

    def end_wait(self, delay_s: float) -> None:
        """The only timer goes off."""
        ((waited_s, what),) = self.timers
        assert waited_s == delay_s
        self.timers.clear()
        what()


class SlowTransport:
    """Takes what is written; how much is left of it the test says."""

    def __init__(self) -> None:
        self.left = 100
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.left

    def abort(self) -> None:
        self.is_aborted = True


def test_who_reads_slowly_goes_on_and_who_stops_is_cut_off() -> None:
    loop, transport = TimersOnly(), SlowTransport()
    bounds = ConnectionBounds(8, header_s=9.0, unread_s=2.0)
    config = BoundedConfig(connections._refuse, bounds, log_config=None, lifespan="off")
    connection = BoundedConnection(config, ServerState(), {}, cast(Any, loop))
    connection.transport = cast(Any, transport)
    connection.flow = FlowControl(connection.transport)
    connection.pause_writing()
    for _ in range(5):
        transport.left -= 1
        loop.end_wait(2.0)
    assert not transport.is_aborted
    loop.end_wait(2.0)
    assert transport.is_aborted
    assert not loop.timers


def test_shares_are_of_the_connections_that_there_are_descriptors_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[GatewaySettings] = []

    def create(settings: GatewaySettings) -> Any:
        made.append(settings)
        return create_app(settings)

    monkeypatch.setattr(server, "create_app", create)
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (1024, 1024))
    monkeypatch.setattr(connections.resource, "setrlimit", lambda *_: None)
    served = server.GatewayServer(GatewaySettings("ipc:///nowhere"), lambda: None)
    assert cast(BoundedConfig, served.config).bounds.connections == 896
    assert [settings.connections for settings in made] == [896]


def asked_stream(served: Gateway) -> socket.socket:
    """A connection whose answer has begun."""
    data = json.dumps(BODY | {"stream": True}).encode()
    head = HEADERS.replace(b"5000", str(len(data)).encode()).replace(
        b"Host:", b"Connection: close\r\nHost:"
    )
    sock = connected(served)
    sock.sendall(head + data)
    assert sock.recv(1, socket.MSG_PEEK) == b"H"
    return sock


def test_who_waits_longest_makes_room_and_who_is_at_work_stays() -> None:
    gate = StepGate()
    with http_engine(gate=gate, connections=8, header_s=60, ping_s=0.05) as served:
        streams = [asked_stream(served) for _ in range(2)]
        idle = [connected(served) for _ in range(9)]
        with connected(served) as fresh:
            fresh.sendall(HEALTH)
            assert status(one_answer(fresh)) == 200  # whoever watches is answered under load
            fresh.sendall(MODELS)
            # A quarter of all may be at work, and two are.
            answer = one_answer(fresh)
        assert (status(answer), code(answer)) == (429, "too_many_requests")
        assert b"retry-after: 1" in answer
        assert idle[0].recv(1) == b""
        gate.open()
        for sock in streams:
            assert b"data: [DONE]" in rest(sock)
        for sock in idle:
            sock.close()


def test_where_all_are_at_work_a_new_one_is_told() -> None:
    gate = StepGate()
    with http_engine(gate=gate, connections=1, ping_s=0.05) as served:
        stream = asked_stream(served)
        with connected(served) as second:
            second.sendall(HEALTH)
            answer = rest(second)
        assert (status(answer), code(answer)) == (503, "too_many_connections")
        assert b"retry-after: 1" in answer
        gate.open()
        assert b"data: [DONE]" in rest(stream)


def test_a_tenants_requests_leave_others_theirs() -> None:
    statuses: list[int] = []
    ended = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await ended.wait()
        await Response()(scope, receive, send)

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def receive() -> Message:
        raise AssertionError

    async def ask_all() -> None:
        shares = RequestShares(app, most=4)
        async with asyncio.TaskGroup() as tasks:
            for tenant in "aaaaaabbb":
                scope = {"type": "http", "path": "/v1/models", TENANT: tenant}
                tasks.create_task(shares(scope, receive, send))
            await asyncio.sleep(0)
            assert statuses == [429, 429, 429]  # two of a's, and b's past its share
            ended.set()

    asyncio.run(ask_all())
    assert statuses[3:] == [200] * 6
