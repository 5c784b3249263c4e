"""Files and folders that appear whole or not at all, whoever else makes them or dies."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sessionkv.model.progress import Progress, ProgressSink


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that readers see the old content or the new, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def make_folder_once(
    target: Path, locks: Path, make: Callable[[Path, int], Path], *, progress: ProgressSink
) -> Path:
    """The folder ``target``, made now if it is not there; returns it.

    Safe when several processes ask at once (one works, the others wait for it) and when one is
    killed in the middle (the next starts over; nothing half-made is ever under the final name).

    Args:
        target: Final place. What it holds must follow from its name alone.
        locks: Folder for the lock file.
        make: Makes the folder below the empty scratch folder it is given, and returns it. Also
            given the lock's descriptor, for children to inherit.
        progress: Told when another process has to be waited for.
    """
    if target.is_dir():
        return target
    with exclusive_lock(locks / f"{target.name}.lock", progress) as lock:
        if target.is_dir():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".tmp-{target.name}-"
        for left_over in target.parent.glob(f"{glob.escape(prefix)}*"):
            shutil.rmtree(left_over)
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=prefix))
        try:
            make(scratch, lock).rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


@contextmanager
def exclusive_lock(path: Path, progress: ProgressSink) -> Iterator[int]:
    """Hold the lock file; yields its descriptor, which a child may inherit to hold it too.

    The lock belongs to the open file: it is free once this process and every child that inherited
    the descriptor are gone, however they ended. Waits without limit for another holder, and says
    so through one ``wait`` event.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(Progress("wait", 0, 0, "steps"))
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)
