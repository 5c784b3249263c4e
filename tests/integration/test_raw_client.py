"""The example client of the protocol, against a scripted engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sessionkv import launch
from sessionkv.ipc import messages as m
from tests.builders.fake_engine import FakeEngine, short_endpoint

EXAMPLE = Path(__file__).parents[2] / "examples" / "raw_client.py"


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_example_speaks_the_protocol():
    with short_endpoint() as endpoint, FakeEngine(endpoint) as engine:
        done = run(endpoint, "trip", "abc")
        engine.wait_for(m.Bye)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1:] == [
        "session trip: 1 turns, 5 tokens",
        "abc",
        "[stop] prompt 3 tokens: 1 from device, 0 from host, 0 from disk, 2 computed",
        "stats: blocks",
    ]
    kinds = [type(r) for _, r in engine.requests if not isinstance(r, m.Ping)]
    assert kinds == [m.Hello, m.Open, m.Turn, m.Stats, m.Bye]
    assert engine.malformed == []


def test_a_real_engine_understands_it():
    with launch("checksum") as engine:
        done = run(engine.endpoint, "trip", "hello")
        assert (done.returncode, done.stderr) == (0, "")
        assert engine.client().session("trip").info().turns == 1
    assert "session trip: 0 turns, 0 tokens" in done.stdout
    assert "0 from device, 0 from host, 0 from disk" in done.stdout


def test_an_error_is_shown_in_the_engines_words():
    with (
        short_endpoint() as endpoint,
        FakeEngine(
            endpoint, answer=lambda r: [m.Failure(r.id, code="session_busy", message="busy")]
        ),
    ):
        done = run(endpoint, "trip", "abc")
    assert (done.returncode, done.stderr) == (1, "session_busy: busy\n")


def test_help_is_its_docstring():
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: python examples/raw_client.py [ENDPOINT] [SESSION] [TEXT]" in done.stdout


def test_the_example_needs_nothing_of_this_package():
    imports = [line for line in EXAMPLE.read_text().splitlines() if " import" in f" {line}"[:8]]
    assert imports == ["import os", "import sys", "import time", "import msgpack", "import zmq"]
