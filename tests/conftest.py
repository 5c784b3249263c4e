"""What every test gets: markers that need hardware or files, and a check for what it leaves behind.

A test fails that leaves behind a child process, a thread (the product's daemon threads too), an
open socket or file of a store, or anything in the folder for temporary files.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest

DAEMONS = frozenset(
    ("front", "core", "movers", "pinning", "store-journal", "store-blocks", "sessionkv-client")
)
LEAK_GRACE_S = 5.0
"""How long a process or thread that was told to end may take to be gone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip ``gpu`` tests where there is no CUDA device. Nothing else is ever skipped."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The default model, prepared in the user's cache; the name to give as ``model``.

    The first use on a machine downloads and converts it, which may take minutes.
    """
    from sessionkv.config import DEFAULT_MODEL, user_cache_dir
    from sessionkv.model.prepare import prepare_model

    prepare_model(DEFAULT_MODEL, cache_dir=user_cache_dir())
    return DEFAULT_MODEL


def _child_pids() -> set[int]:
    """Children of this process, multiprocessing's own helpers excepted."""
    pids = set()
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            pids |= {int(pid) for pid in path.read_text().split()}
        except OSError:
            continue  # that thread has ended
    return {pid for pid in pids if not _is_helper(pid)}


def _is_helper(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True  # gone
    return state == "Z" or b"resource_tracker" in command or b"forkserver" in command


def _threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if not t.daemon or t.name in DAEMONS}


def _open_files() -> set[str]:
    """Sockets, and files of stores, that this process has open."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the listing's own
        if target.startswith("socket:") or target.endswith((".mdb", ".kv", "/lock", ".lock")):
            found.add(f"{fd} {target}")
    return found


def _temporary() -> set[str]:
    """But for what torch and multiprocessing keep for the life of a process."""
    names = os.listdir(tempfile.gettempdir())
    return {name for name in names if not name.startswith(("torchinductor_", "pymp-"))}


def _left_behind(before: tuple[set[Any], ...]) -> list[set[Any]]:
    after = (_child_pids(), _threads(), _open_files(), _temporary())
    return [now - then for now, then in zip(after, before, strict=True)]


@pytest.fixture(autouse=True, scope="session")
def temporary_folder() -> Iterator[None]:
    """A folder for temporary files that is nobody else's; short, as sockets lie in it."""
    outer = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="skt-", dir="/tmp")
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", outer)  # tmp_path stays where one looks for it
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    # At exit, after multiprocessing has removed its own part (at priority -100).
    Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-200)
    yield
    tempfile.tempdir = os.environ["TMPDIR"] = outer


@pytest.fixture(autouse=True)
def no_leaks(temporary_folder: None) -> Iterator[None]:
    """Fail a test that leaves something behind."""
    before = (_child_pids(), _threads(), _open_files(), _temporary())
    yield
    if any(_left_behind(before)):
        gc.collect()  # clients that were dropped without being closed
    deadline = time.monotonic() + LEAK_GRACE_S
    while any(left := _left_behind(before)) and time.monotonic() < deadline:
        time.sleep(0.01)
    pids, threads, files, temporary = left
    for pid in pids:
        os.kill(pid, 9)
    assert not pids, f"processes left running (killed now): {sorted(pids)}"
    assert not threads, f"threads left running: {sorted(t.name for t in threads)}"
    assert not files, f"left open: {sorted(files)}"
    assert not temporary, f"left in the folder for temporary files: {sorted(temporary)}"


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line; exit code, output and remarks."""
    from sessionkv.cli.main import main

    def call(*argv: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main([str(arg) for arg in argv])
        return code, *capfd.readouterr()

    return call
