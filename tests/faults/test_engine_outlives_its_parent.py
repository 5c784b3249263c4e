"""A private engine ends with its parent, however that ends and whatever the engine is doing.

One that was started with ``serve`` is nobody's, and stays.
"""

import os
import signal
from pathlib import Path

import pytest

from sessionkv import launch
from sessionkv.ipc.endpoint import socket_path
from tests.builders.engine import greedy
from tests.builders.fake_engine import short_endpoint
from tests.builders.processes import script, tampered_start, wait_for_file, wait_gone
from tests.builders.wire_client import WireClient

PARENT = """
import sys
from sessionkv import SamplingParams, launch
engine = launch("checksum", store=sys.argv[1])
client = engine.client()
session = client.open("a")
session.turn("x", sampling=SamplingParams(max_tokens=4, ignore_eos=True))
print(engine.pid, engine._scratch, flush=True)
if sys.argv[2] == "busy":
    stream = session.stream("y", sampling=SamplingParams(temperature=0, ignore_eos=True))
    next(stream)
    print("busy", flush=True)
sys.stdin.read()
"""
STARTING = """
import sys
from sessionkv import launch
launch("checksum", store=sys.argv[1])
"""


def engine_of(parent_pid: int) -> int:
    """Pid of the one child of a process."""
    (pid,) = Path(f"/proc/{parent_pid}/task/{parent_pid}/children").read_text().split()
    return int(pid)


@pytest.mark.parametrize("doing", ["idle", "busy"])
def test_child_is_gone_and_the_store_can_be_opened(tmp_path: Path, doing: str) -> None:
    with script(PARENT, tmp_path / "store", doing) as parent:
        assert parent.stdout is not None
        pid, scratch = parent.stdout.readline().split()
        if doing == "busy":
            assert parent.stdout.readline() == "busy\n"
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert wait_gone(int(pid))
    assert not Path(scratch).exists()
    with launch("checksum", store=tmp_path / "store") as engine:
        session = engine.client().open("a")
        assert session.info().turns == 1
        assert session.turn("z", sampling=greedy(2)).tokens


@pytest.mark.parametrize("load", ["hang", "hang_deaf"])
def test_child_is_gone_when_its_parent_dies_while_it_loads(
    tmp_path: Path, load: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", tampered_start(tmp_path, load))
    with script(STARTING, tmp_path / "store") as parent:
        wait_for_file(tmp_path / "loading")
        pid = engine_of(parent.pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert wait_gone(pid)
    monkeypatch.undo()
    with launch("checksum", store=tmp_path / "store") as engine:
        assert engine.client().open("a").info().turns == 0


def test_an_engine_that_is_told_nothing_ends() -> None:
    """The parent died between starting it and telling it what to run."""
    code = """
import os, subprocess, sys
status_read, status_write = os.pipe()
lifeline_read, lifeline_write = os.pipe()
child = subprocess.Popen(
    [sys.executable, "-m", "sessionkv.actor.child", str(status_write), str(lifeline_read)],
    pass_fds=(status_write, lifeline_read),
)
print(child.pid, flush=True)
os._exit(0)
"""
    with script(code) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert wait_gone(pid, 20.0)  # it first has to come up


SERVING = """
import subprocess, sys
command = [sys.executable, "-m", "sessionkv", "serve", "checksum", *sys.argv[1:]]
engine = subprocess.Popen(command, stdout=subprocess.DEVNULL)
print(engine.pid, flush=True)
sys.stdin.read()
"""


def test_an_engine_that_serves_everybody_stays_when_its_parent_is_killed(tmp_path: Path) -> None:
    with short_endpoint() as endpoint:
        arguments = ("--endpoint", endpoint, "--store", tmp_path / "store")
        with script(SERVING, *arguments) as parent:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            try:
                wait_for_file(socket_path(endpoint))
                with WireClient(endpoint) as client:  # it is up when it greets
                    parent.send_signal(signal.SIGKILL)
                    parent.wait()
                    asked = {"tokens": [1], "sampling": {"temperature": 0, "max_tokens": 4}}
                    assert client.call("generate", 1, **asked)["t"] == "done"
            finally:
                os.kill(pid, signal.SIGTERM)
            assert wait_gone(pid)


def test_ctrl_c_of_the_terminal_is_the_parents_alone() -> None:
    with launch("checksum") as engine:
        os.kill(engine.pid, signal.SIGTERM)  # what close sends: it drains and ends with 0
        assert engine._process.wait(20) == 0
    with launch("checksum") as engine:
        assert os.getpgid(engine.pid) == engine.pid != os.getpgrp()
