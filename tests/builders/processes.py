"""Real processes: whether one is gone, and engines whose start is tampered with."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GONE_S = 5.0
"""How long a process may outlive what it depends on."""

TAMPERED = """
import pathlib, time
import sessionkv.engine.build as build

def hang(*args):
    pathlib.Path({mark!r}).touch()
    while True:
        time.sleep(60)

def hang_deaf(*args):
    pathlib.Path({mark!r}).touch()
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass

def fail(*args):
    raise RuntimeError("no such luck")

build._load_runner = {what}
"""
PATCHED = """
import sys
if {module!r} in sys.orig_argv:
    exec({code!r})
"""
CORE, FRONT = "sessionkv.actor.child", "sessionkv.actor.front_main"
"""The processes of a launched engine, by the modules that they run."""


def patched_child(folder: Path, code: str, module: str = CORE) -> str:
    """``PYTHONPATH`` with which a process of a launched engine first runs ``code``."""
    (folder / "sitecustomize.py").write_text(PATCHED.format(code=code, module=module))
    return f"{folder}{os.pathsep}{ROOT}"


HELD = """
import pathlib, time
import sessionkv.engine.build as build
load, folder = build._load_runner, pathlib.Path({folder!r})

def held(*args):
    (folder / "loading").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    return load(*args)

build._load_runner = held
"""


def held_load(folder: Path) -> str:
    """``PYTHONPATH`` with which a launched engine's load makes ``folder/loading`` and goes on when
    ``folder/go`` is there.
    """
    return patched_child(folder, HELD.format(folder=str(folder)))


def front_of(core_pid: int) -> int:
    """Pid of an engine's front: the one child of the process that serves."""
    (pid,) = Path(f"/proc/{core_pid}/task/{core_pid}/children").read_text().split()
    return int(pid)


def tampered_start(folder: Path, what: str) -> str:
    """``PYTHONPATH`` with which a launched engine's load does ``hang``, ``hang_deaf`` or ``fail``.

    When it hangs it has made the file ``folder/loading``.
    """
    return patched_child(folder, TAMPERED.format(mark=str(folder / "loading"), what=what))


def is_gone(pid: int) -> bool:
    """Whether it has ended; a zombie that nobody collects has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def wait_gone(pid: int, seconds: float = GONE_S) -> bool:
    """Whether it ended within so many seconds."""
    deadline = time.monotonic() + seconds
    while not is_gone(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def wait_for_file(path: Path, seconds: float = 60.0) -> None:
    """Until somebody has made it."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)


@contextmanager
def script(code: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """A Python program that is killed at the end; its output is a pipe of lines."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate()
