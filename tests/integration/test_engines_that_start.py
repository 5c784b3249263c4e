"""Whoever comes while an engine loads its model is told so, and waits at the command line."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sessionkv import Client
from sessionkv.errors import ConnectionLost
from sessionkv.ipc.connection import SocketTransport
from sessionkv.ipc.link import Link
from sessionkv.ipc.listener import Listener
from sessionkv.ipc.starting import STARTING, answers, serving_pid
from tests.builders.fake_engine import short_endpoint
from tests.builders.processes import ROOT

SLOW_START = """
import sys
if "serve" in sys.orig_argv:
    import pathlib, time
    import sessionkv.engine.build as build
    load = build._load_runner

    def slow(*args):
        print("loading", flush=True)
        while not pathlib.Path({go!r}).exists():
            time.sleep(0.01)
        return load(*args)

    build._load_runner = slow
"""


def impatient(endpoint: str) -> Client:
    """A client that gives a greeting 0.1 s."""
    transport = SocketTransport(endpoint)
    transport._link = Link(reconnect_s=0.1, heartbeat_s=0.05, missed=2)
    return Client(transport=transport)


def test_a_client_names_the_engine_that_does_not_answer_yet() -> None:
    with short_endpoint() as endpoint, Listener(endpoint), impatient(endpoint) as client:
        with pytest.raises(ConnectionLost, match="still starting") as caught:
            client.stats()
        assert caught.value.details[STARTING] == os.getpid()
        assert f"pid {os.getpid()}" in caught.value.message
        assert not answers(endpoint, timeout_s=0.01)


def test_a_lock_file_without_a_process_is_nobody() -> None:
    with short_endpoint() as endpoint:
        assert serving_pid(endpoint) is None
        lock = Path(f"{endpoint.removeprefix('ipc://')}.lock")
        with subprocess.Popen(["/bin/true"]) as ended:
            pass
        for text in ("", "nobody", f"{ended.pid}\n", "9" * 30):
            lock.write_text(text)
            assert serving_pid(endpoint) is None


@contextmanager
def loading(folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """``serve`` whose model is loaded when ``folder/go`` is there; its endpoint and process."""
    (folder / "sitecustomize.py").write_text(SLOW_START.format(go=str(folder / "go")))
    environ = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    with short_endpoint() as endpoint:
        args = ["serve", "checksum", "--endpoint", endpoint, "--store", str(folder / "store")]
        with (folder / "errors").open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "sessionkv", *args],
                cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        assert process.stdout is not None
        with process.stdout:
            try:
                assert process.stdout.readline() == "loading\n"
                yield endpoint, process
            finally:
                process.terminate()
                process.wait(30)


@contextmanager
def waiting(endpoint: str, pid: int, *command: str) -> Iterator[subprocess.Popen[str]]:
    """A command that has said that it waits for the engine."""
    process = subprocess.Popen(
        [sys.executable, "-m", "sessionkv", *command, "--endpoint", endpoint],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        said = process.stderr.readline()
        assert said == f"waiting for the engine (pid {pid}) to start ...\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_commands_wait_until_it_answers(tmp_path: Path) -> None:
    with (
        loading(tmp_path) as (endpoint, engine),
        waiting(endpoint, engine.pid, "sessions", "ls") as listing,
        waiting(endpoint, engine.pid, "chat") as interrupted,
    ):
        interrupted.send_signal(signal.SIGINT)
        assert interrupted.communicate(timeout=30) == ("", "")
        assert interrupted.returncode == 130
        (tmp_path / "go").touch()
        _, errors = listing.communicate(timeout=60)
        assert (listing.returncode, errors) == (0, "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_it_is_ready_is_said_and_seen_in_the_exit_code(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with loading(tmp_path) as (_, engine):
        engine.send_signal(number)
        assert engine.wait(30) == code
        assert engine.stdout is not None
        assert engine.stdout.read() == ""
    assert (tmp_path / "errors").read_text() == "stopped before it was ready\n"


def test_commands_end_with_the_engine_they_wait_for(tmp_path: Path) -> None:
    with (
        loading(tmp_path) as (endpoint, engine),
        waiting(endpoint, engine.pid, "stats") as asking,
    ):
        engine.kill()
        engine.wait()
        _, errors = asking.communicate(timeout=60)
        assert asking.returncode == 1
        assert f"(pid {engine.pid}) ended before it was ready" in errors
