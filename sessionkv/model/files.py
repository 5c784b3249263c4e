"""Files that appear whole or not at all, and locks between processes."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
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
