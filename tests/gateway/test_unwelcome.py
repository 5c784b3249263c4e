"""Requests that nobody should send, and clients that vanish: refused in order, and few words."""

import asyncio
import json
import logging
import socket
import struct
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from starlette.types import Message

from sessionkv.config import LimitsConfig
from sessionkv.errors import ConnectionLost, StoreUnavailable
from sessionkv.gateway import server
from sessionkv.gateway.app import create_app
from sessionkv.gateway.errors import problem_of
from sessionkv.gateway.settings import GatewaySettings
from sessionkv.gateway.sse import EventStream
from tests.builders.engine import StepGate, engine_config, socket_engine
from tests.builders.gateway import Gateway, gateway, http_engine
from tests.builders.tenants import KEYS, access

SERVICE = "the-gateways-own"
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
BODY: dict[str, Any] = {
    "model": "checksum",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 4,
    "temperature": 0,
}
UPGRADE = (
    "GET /v1/models HTTP/1.1\r\nHost: {}\r\nUpgrade: websocket\r\nConnection: Upgrade, close\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
HALF = (
    "POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    "Expect: 100-continue\r\nContent-Length: 5000\r\n\r\n{"
)


def connected(served: Gateway, text: str) -> socket.socket:
    """A connection over which something was sent."""
    parts = urlsplit(served.url)
    sock = socket.create_connection((parts.hostname, parts.port), timeout=30)
    sock.sendall(text.encode())
    return sock


def to_the_end(sock: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    with sock:
        return b"".join(iter(lambda: sock.recv(65536), b""))


# Upgrades


@pytest.mark.parametrize(("host", "status"), [("evil.example", 403), ("localhost", 200)])
def test_an_upgrade_is_a_request_like_any_other(host: str, status: int) -> None:
    with http_engine() as served:
        answer = to_the_end(connected(served, UPGRADE.format(host)))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())


def test_an_upgrade_needs_a_key(tmp_path: Path) -> None:
    with (
        socket_engine(tmp_path, access=access().with_service(SERVICE)) as engine,
        gateway(engine.endpoint, key=SERVICE) as served,
    ):
        answer = to_the_end(connected(served, UPGRADE.format("localhost")))
    assert answer.startswith(b"HTTP/1.1 401 ")


def test_a_web_socket_is_closed() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError

    app = create_app(GatewaySettings("ipc:///nowhere"))
    scope = {"type": "websocket", "path": "/v1/models", "headers": [(b"host", b"localhost")]}
    asyncio.run(app(scope, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


# Bodies


def test_a_body_that_does_not_come_is_given_up() -> None:
    with http_engine(body_pause_s=0.05) as served:
        answer = to_the_end(connected(served, HALF))
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 408 ")
    assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]["code"] == "body_timeout"


def test_only_the_body_is_waited_for_so_long() -> None:
    """It comes at once with the head, as a client that is slow to write would be cut off here."""
    gate = StepGate()
    body = json.dumps(BODY | {"stream": True})
    head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
    with http_engine(gate=gate, body_pause_s=0.1, ping_s=0.05) as served:
        sock = connected(served, f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n{body}")
        answer = b""
        while answer.count(b": ping") < 4 and (more := sock.recv(65536)):
            answer += more  # for longer than the body would be waited for
        gate.open()
        answer += to_the_end(sock)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b": ping") >= 4
    assert b"data: [DONE]" in answer


def test_the_end_is_no_failure_of_a_request_that_is_half_sent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "GRACE_S", 0)
    with http_engine() as served:
        sock = connected(served, HALF)
        assert sock.recv(25, socket.MSG_WAITALL) == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert to_the_end(sock).startswith(b"HTTP/1.1 503 ")
    assert [record for record in caplog.records if record.exc_info] == []


def test_a_body_beyond_the_engines_frames_is_too_large() -> None:
    config = engine_config(blocks=512, limits=LimitsConfig(frame_bytes=16 * 1024))
    with http_engine(config) as served:
        answer = served.post(CHAT, BODY | {"ignored": "x" * 16 * 1024})
        assert answer.status_code == 413
        assert "16384 bytes" in answer.json()["error"]["message"]
        tokens = {"model": "checksum", "prompt": [1] * 5000, "max_tokens": 1}  # four bytes each
        answer = served.post("/v1/completions", tokens)
        assert answer.status_code == 413
        error = answer.json()["error"]
    assert (error["code"], error["allowed_bytes"]) == ("request_too_large", 16 * 1024)
    assert "generate" not in error["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_another_content_type_is_told_what_to_send(kind: str) -> None:
    with http_engine() as served:
        sent = json.dumps(BODY)
        answer = served.http.post(CHAT, content=sent, headers={"Content-Type": kind})
        assert answer.status_code == 415
        assert "application/json" in answer.json()["error"]["message"]
        listed = served.http.post(CHAT, json=[BODY])
        assert listed.status_code == 400


# Clients that vanish


def test_a_client_that_vanished_is_not_written_to_for_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its connection is reset between two of many events that are all there already."""
    made: list[int] = []
    client = socket.socket()

    async def events() -> AsyncGenerator[bytes, None]:
        for number in range(1000):
            made.append(number)
            if number == 10:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
            yield b"data: x\n\n"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await EventStream(events(), ping_s=60)(scope, receive, send)
        served.should_exit = True

    served = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, ws="none"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client.connect(listener.getsockname())
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        asyncio.run(served.serve(sockets=[listener]))
    assert 10 < len(made) < 30
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


# What is told


@pytest.mark.parametrize("path", ["/v1/models", MESSAGES])
def test_a_missing_and_an_unknown_key_are_answered_alike(tmp_path: Path, path: str) -> None:
    with (
        socket_engine(tmp_path, access=access().with_service(SERVICE)) as engine,
        gateway(engine.endpoint, key=SERVICE) as served,
    ):
        missing = served.http.get(path)
        unknown = served.http.get(path, headers={"x-api-key": "nobody"})
    assert missing.status_code == unknown.status_code == 401
    assert missing.content == unknown.content
    challenges = {answer.headers["WWW-Authenticate"] for answer in (missing, unknown)}
    assert len(challenges) == 1
    assert "x-api-key" in missing.json()["error"]["message"]
    assert "hello" not in missing.text


def test_a_stream_whose_key_is_taken_back_tells_no_path(tmp_path: Path) -> None:
    keys = access().with_service(SERVICE)
    fewer = type(keys)(tuple(key for key in keys.keys if key.name != "bob"))
    gate = StepGate()
    with (
        socket_engine(tmp_path, engine_config(), access=keys, gate=gate) as engine,
        gateway(engine.endpoint, key=SERVICE, ping_s=0.05) as served,
    ):
        headers = {"Authorization": f"Bearer {KEYS['bob']}"}
        asked = BODY | {"stream": True}
        with served.http.stream("POST", CHAT, json=asked, headers=headers) as response:
            engine.host.renew_access(fewer)
            gate.open()
            told = response.read().decode()
    assert '"error"' in told
    assert "ipc:" not in told
    assert str(tmp_path) not in told


@pytest.mark.parametrize(
    "error",
    [
        ConnectionLost("the engine went (ipc:///run/x.sock)", endpoint="ipc:///run/x.sock"),
        ConnectionLost("an engine (pid 5) is at ipc:///run/x.sock and still starting"),
        StoreUnavailable("/run/x cannot be opened: full", directory="/run/x"),
    ],
)
def test_no_place_on_this_machine_is_told(error: Exception) -> None:
    assert "/run" not in json.dumps(problem_of(error).openai())


@pytest.mark.parametrize(
    "host",
    ["evil.com@127.0.0.1", "127.0.0.1:8200/evil", "localhost?x", "localhost#x", "localhost\\x"],
)
def test_a_host_is_a_name_and_a_port_and_no_more(host: str) -> None:
    with http_engine() as served:
        assert served.http.get("/v1/models", headers={"Host": host}).status_code == 403
