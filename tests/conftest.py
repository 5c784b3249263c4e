"""What every test gets: markers that need hardware or files, and a check for what it leaves behind.

A test that ends with a child process or a non-daemon thread that was not there before it fails.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    return {thread for thread in threading.enumerate() if not thread.daemon}


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a child process or a non-daemon thread running."""
    pids, threads = _child_pids(), _threads()
    yield
    deadline = time.monotonic() + LEAK_GRACE_S
    while (_child_pids() - pids or _threads() - threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    left_pids, left_threads = _child_pids() - pids, _threads() - threads
    for pid in left_pids:
        os.kill(pid, 9)
    assert not left_pids, f"processes left running (killed now): {sorted(left_pids)}"
    assert not left_threads, f"threads left running: {sorted(t.name for t in left_threads)}"
