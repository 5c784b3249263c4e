"""What a full disk looks like to those that write, and what is said of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import lmdb

from sessionkv.errors import StoreUnavailable

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NEARLY_FULL_BYTES = 1024**2


def is_full(error: BaseException | None) -> bool:
    """Whether a failure may mean that the disk is full."""
    if isinstance(error, lmdb.Error):
        # LMDB answers a short write, as a full disk makes it, with EIO.
        return getattr(error, "code", None) in (*NO_SPACE, errno.EIO)
    return isinstance(error, OSError) and error.errno in NO_SPACE


def not_written(what: str, path: Path, error: lmdb.Error) -> StoreUnavailable:
    """For who asked: ``what`` in ``path`` was not written; retryable where room is all it needs."""
    code = getattr(error, "code", None)
    if is_full(error) and (code != errno.EIO or _has_no_room(path)):
        why = os.strerror(errno.ENOSPC if code in (None, errno.EIO) else code)
        return StoreUnavailable(
            f"{what} {path} cannot be written ({why}): free space on its disk; the engine goes on "
            "by itself",
            retryable=True,
            directory=str(path),
        )
    return StoreUnavailable(f"{what} {path} cannot be written: {error}", directory=str(path))


def _has_no_room(path: Path) -> bool:
    """Whether a short write is explained by a disk that is full, and is no failure of it."""
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _NEARLY_FULL_BYTES
