"""``serve --keys`` with real processes: who may come in, over the socket and over HTTP."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import httpx
import pytest

from sessionkv import Client, SamplingParams
from sessionkv.errors import Unauthorized
from tests.integration.test_cli import Place, place  # noqa: F401 - a fixture

BODY = {
    "model": "checksum",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 4,
    "temperature": 0,
}


def _add(place: Place, *args: str) -> str:  # noqa: F811
    done = place.run("keys", "add", *args, endpoint=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _status(url: str, key: str, path: str = "/ready") -> int:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.get(f"{url}{path}", headers=headers, timeout=30).status_code


def test_keys_are_asked_for_renewed_and_taken_back(place: Place, tmp_path: Path) -> None:  # noqa: F811
    keys, prompt = tmp_path / "keys.toml", tmp_path / "system.txt"
    prompt.write_text("Everybody may know this system prompt. " * 4)
    file = ("--keys", str(keys))
    first = _add(place, "web", *file, "--turns", "8")
    second = _add(place, "other", *file)
    assert place.run("public", "add", str(prompt), *file, endpoint=False).returncode == 0
    with place.serving(*file, "--http", "127.0.0.1:0") as (process, printed):
        (url,) = (line.split()[1] for line in printed if line.startswith("http "))
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        assert httpx.get(f"{url}/v1/models").status_code == 401
        for key in (first, second):
            answer = httpx.post(
                f"{url}/v1/chat/completions", json=BODY, headers={"x-api-key": key}, timeout=30
            )
            assert answer.status_code == 200
        with Client(place.endpoint) as nobody, pytest.raises(Unauthorized):
            nobody.sessions()
        with Client(place.endpoint, key=first) as one, Client(place.endpoint, key=second) as two:
            turns = [
                client.open("s", system=prompt.read_text()).turn(
                    "hello", sampling=SamplingParams(max_tokens=2)
                )
                for client in (one, two)
            ]
            assert turns[0].cache.cached_tokens == 0
            assert turns[1].cache.cached_tokens >= len(prompt.read_text()) // 16 * 16
        third = _add(place, "late", *file)
        assert place.run("keys", "rm", "other", *file, endpoint=False).returncode == 0
        assert (_status(url, second), _status(url, third)) == (200, 401)
        process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 30
        while (_status(url, second), _status(url, third)) != (401, 200):
            assert time.monotonic() < deadline
        keys.write_text("not toml")
        process.send_signal(signal.SIGHUP)  # said in the log, and nothing changes
        assert _status(url, third) == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert "the keys stay as they were" in process.stderr.read()


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "example.org"])
def test_nobody_listens_beyond_this_machine_without_keys(place: Place, host: str) -> None:  # noqa: F811
    done = place.run("serve", "checksum", "--store", str(place.store), "--http", f"{host}:8000")
    assert done.returncode == 2
    assert "--http" in done.stderr
    assert "--keys FILE" in done.stderr
    assert not place.store.exists()


def test_a_file_of_keys_that_others_may_read_is_refused(place: Place, tmp_path: Path) -> None:  # noqa: F811
    keys = tmp_path / "keys.toml"
    _add(place, "a", "--keys", str(keys))
    keys.chmod(0o644)
    done = place.run("serve", "checksum", "--store", str(place.store), "--keys", str(keys))
    assert done.returncode == 2
    assert "chmod 600" in done.stderr
