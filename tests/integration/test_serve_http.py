"""``sessionkv serve --http`` with real processes."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import httpx
import pytest

from tests.builders.processes import wait_gone
from tests.integration.test_cli import Place, place  # noqa: F401 - a fixture


def _children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _chat(url: str) -> httpx.Response:
    body = {
        "model": "checksum",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4,
        "temperature": 0,
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)


def test_serve_with_http_answers_and_ends_with_its_processes(place: Place) -> None:  # noqa: F811
    with place.serving("--http", "127.0.0.1:0") as (process, printed):
        (url,) = (line.split()[1] for line in printed if line.startswith("http "))
        answer = _chat(url)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 4
        pids = _children(process.pid)
        assert len(pids) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert all(wait_gone(pid) for pid in pids)


def test_a_taken_port_is_said_at_once(place: Place) -> None:  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = place.run("serve", "checksum", "--store", str(place.store), "--http", f":{port}")
    assert done.returncode == 1
    assert done.stderr == (
        f"sessionkv: HTTP cannot be served at 127.0.0.1:{port} (Address already in use)\n"
        "  Choose another port, or 0 for a free one: --http HOST:PORT.\n"
    )


@pytest.mark.parametrize("address", ["8000x", "host:70000", "host:"])
def test_no_address_is_wrong_usage(place: Place, address: str) -> None:  # noqa: F811
    done = place.run("serve", "checksum", "--http", address)
    assert done.returncode == 2
    assert "--http" in done.stderr


def test_a_gateway_that_dies_ends_the_engine(place: Place) -> None:  # noqa: F811
    with place.serving("--http", "127.0.0.1:0") as (process, _):
        (gateway,) = (
            pid
            for pid in _children(process.pid)
            if b"sessionkv.gateway" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        os.kill(gateway, signal.SIGKILL)
        assert process.wait(30) == 1
        assert process.stderr is not None
        assert "gateway (HTTP) ended with code -9" in process.stderr.read()
