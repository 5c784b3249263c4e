"""An engine is two processes, core and front: whichever dies, the other ends; no turn is lost."""

import os
import signal
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from sessionkv import EngineConfig, EngineProcess, LimitsConfig, launch
from sessionkv.actor.front_link import StartFront
from sessionkv.actor.front_process import FrontProcess
from sessionkv.actor.front_setup import FrontSetup
from sessionkv.errors import ConnectionLost, EngineStartFailed, ModelBroken
from sessionkv.ipc.endpoint import is_listening
from sessionkv.ipc.listener import Listener
from sessionkv.ipc.starting import serving_pid
from sessionkv.store.directory import StoreDirectory
from sessionkv.text.builtin import byte_text
from sessionkv.text.folder import TextFiles
from tests.builders.doors import Later
from tests.builders.engine import greedy, oracle
from tests.builders.fake_engine import short_endpoint
from tests.builders.processes import (
    FRONT,
    GONE_S,
    ROOT,
    front_of,
    held_load,
    patched_child,
    tampered_start,
    wait_for_file,
    wait_gone,
)
from tests.builders.wire_client import WireClient

STARTING = """
import pathlib, sys
sys.orig_argv.append("sessionkv.actor.child")
import sitecustomize
exec(pathlib.Path(sitecustomize.__file__).read_text())
from sessionkv.actor.serve import run_serve
from sessionkv.config import EngineConfig
sys.exit(run_serve(EngineConfig(model="checksum", store=sys.argv[2]), sys.argv[1]))
"""

COUNTING = """
import os, struct
from sessionkv.engine.core import Core
from sessionkv.engine.messages import StepTokens
told, total, emit = os.open({path!r}, os.O_WRONLY | os.O_CREAT, 0o600), 0, Core._emit

def counting(core):
    global total
    steps = sum(isinstance(message, StepTokens) for message in core._turns.out)
    emit(core)
    total += steps
    os.pwrite(told, struct.pack("<Q", total), 0)

Core._emit = counting
"""
"""Core keeps in a file how many steps it has told the front of."""
SPEECHLESS = """
from sessionkv.engine.core import Core
emit = Core._emit

def end(core):
    emit(core)
    if core._turns.active:
        raise SystemExit

Core._emit = end
"""
"""Core's thread ends with its first turn, and says nothing."""

BUSY = """
import pathlib, time
from sessionkv.text.model import TextModel

def encode_prompt(*args):
    pathlib.Path({mark!r}).touch()
    while True:
        time.sleep(60)

TextModel.encode_prompt = encode_prompt
"""
"""The front never comes back from a prompt, which is a text of any length."""


def cpu_time(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def wait_idle(pid: int) -> None:
    """Until a process has taken no processor time for a while."""
    before, after = -1, cpu_time(pid)
    while before != after:
        waiter = subprocess.run(["sleep", "0.5"], check=True)  # only the clock can show idleness
        assert waiter.returncode == 0
        before, after = after, cpu_time(pid)


def wait_deaf(endpoint: str) -> None:
    """Until nobody listens there: a process's threads end one after the other."""
    deadline = time.monotonic() + GONE_S
    while is_listening(endpoint):
        assert time.monotonic() < deadline


def assert_nothing_is_held(endpoint: str, store: Path) -> None:
    """The next engine can have both at once."""
    with Listener(endpoint), StoreDirectory.open(store):
        pass


@pytest.mark.parametrize("half", ["core", "front"])
def test_kill_9_of_one_half_ends_the_other(tmp_path: Path, half: str) -> None:
    config = EngineConfig(model="checksum", limits=LimitsConfig(drain_s=60.0))
    with launch(store=tmp_path, config=config) as engine:
        front = front_of(engine.pid)
        client = engine.client()
        session = client.open("a")
        done = session.turn(tokens=[1], sampling=greedy(4))
        stream = session.stream(tokens=[2], sampling=greedy(None))
        next(stream)
        os.kill(engine.pid if half == "core" else front, signal.SIGKILL)
        code = engine._process.wait(20)  # long before the drain's end: nobody waits for the turn
        assert code == (-signal.SIGKILL if half == "core" else 1)
        assert wait_gone(front)
        wait_deaf(engine.endpoint)
        with pytest.raises(ConnectionLost):
            list(stream)
    with launch(store=tmp_path, config=config) as engine:
        session = engine.client().open("a")
        assert session.info().turns == 1
        log = [1, *done.tokens, 3]
        assert list(session.turn(tokens=[3], sampling=greedy(4)).tokens) == oracle(log, greedy(4))


def test_a_front_in_the_middle_of_work_does_not_outlive_its_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = tmp_path / "busy"
    code = BUSY.format(mark=str(busy))
    monkeypatch.setenv("PYTHONPATH", patched_child(tmp_path, code, FRONT))
    with launch("checksum") as engine, WireClient(engine.endpoint) as client:
        front = front_of(engine.pid)
        client.send("generate", 1, prompt="x")
        wait_for_file(busy)
        engine.kill()
        try:
            assert wait_gone(front)
        finally:
            with suppress(ProcessLookupError):
                os.kill(front, signal.SIGKILL)


def test_the_halves_end_together_when_told_to() -> None:
    with launch("checksum") as engine:
        front = front_of(engine.pid)
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(front, number)  # a service manager tells all processes: core's is the one
        assert engine.client().generate(tokens=[1], sampling=greedy(2)).tokens
        os.kill(engine.pid, signal.SIGTERM)
        assert engine._process.wait(20) == 0
        assert wait_gone(front)


def test_a_front_that_stands_still_holds_up_no_end() -> None:
    with launch("checksum") as engine:
        front = front_of(engine.pid)
        os.kill(front, signal.SIGSTOP)
        os.kill(engine.pid, signal.SIGTERM)
        assert engine._process.wait(20) == 1
        assert wait_gone(front)


def test_core_waits_for_a_front_that_is_behind_and_all_comes_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = greedy(8000)
    told = tmp_path / "told"
    code = COUNTING.format(path=str(told))
    monkeypatch.setenv("PYTHONPATH", patched_child(tmp_path, code))
    with launch("checksum") as engine:
        front = front_of(engine.pid)
        with engine.client().stream_generate(tokens=[1, 2], sampling=sampling) as stream:
            got = list(next(stream).tokens)
            os.kill(front, signal.SIGSTOP)
            wait_idle(engine.pid)
            (steps,) = struct.unpack("<Q", told.read_bytes())
            assert len(got) <= steps < 8000
            os.kill(front, signal.SIGCONT)
            for event in stream:
                assert event.offset == len(got) or event.result is not None
                got += event.tokens
            assert stream.result is not None
        assert got == list(stream.result.tokens) == oracle([1, 2], sampling)
        assert struct.unpack("<Q", told.read_bytes()) == (8000,)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_end_while_it_starts_leaves_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Ctrl-C goes to the whole group of the terminal's processes."""
    monkeypatch.setenv("PYTHONPATH", tampered_start(tmp_path, "hang"))
    with short_endpoint() as endpoint:
        core = subprocess.Popen(
            [sys.executable, "-c", STARTING, endpoint, tmp_path / "store"],
            cwd=ROOT,
            start_new_session=True,
        )
        wait_for_file(tmp_path / "loading")
        front = front_of(core.pid)
        os.killpg(core.pid, number)
        assert core.wait(20) == (128 + number if number == signal.SIGINT else -number)
        assert wait_gone(front, 20.0)  # it may have to come up first
        wait_deaf(endpoint)
        assert_nothing_is_held(endpoint, tmp_path / "store")


def test_a_core_that_ends_without_a_word_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", patched_child(tmp_path, SPEECHLESS))
    with launch("checksum", store=tmp_path / "store") as engine:
        front = front_of(engine.pid)
        client = engine.client()
        session = client.open("a")
        with pytest.raises(ConnectionLost):
            session.turn(tokens=[1], sampling=greedy(4))
        assert engine._process.wait(20) == 1
        assert wait_gone(front)
        wait_deaf(engine.endpoint)
    monkeypatch.undo()
    with launch("checksum", store=tmp_path / "store") as engine:
        assert engine.client().session("a").info().turns == 0


def test_a_front_that_cannot_start_says_why() -> None:
    text = TextFiles("{}", None, byte_text().facts)
    setup = FrontSetup(text, "checksum", 1, 9, LimitsConfig())
    with (
        short_endpoint() as endpoint,
        Listener(endpoint) as listener,
        FrontProcess(listener.take()) as front,
    ):
        with pytest.raises(ModelBroken, match="built-in"):
            front.begin(StartFront(endpoint, setup))
        assert wait_gone(front.pid)


def test_a_front_that_dies_while_the_model_loads_is_the_starts_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", held_load(tmp_path))
    with short_endpoint() as endpoint:
        starting = Later(lambda: launch("checksum", store=tmp_path / "store", endpoint=endpoint))
        wait_for_file(tmp_path / "loading")
        core = serving_pid(endpoint)
        assert core is not None
        front = front_of(core)
        os.kill(front, signal.SIGKILL)
        assert wait_gone(front)
        (tmp_path / "go").touch()
        error = starting.error()
        assert isinstance(error, EngineStartFailed)
        assert "front died" in error.message
        assert_nothing_is_held(endpoint, tmp_path / "store")


def test_an_engine_that_is_killed_by_its_handle_leaves_no_half() -> None:
    engine: EngineProcess = launch("checksum")
    front = front_of(engine.pid)
    engine.kill()
    assert wait_gone(front)
