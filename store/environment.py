"""Opening and growing LMDB environments safely; shared by the journal and the block index.

Invariants: no writemap; a data file that LMDB could not read without crashing the process is moved
aside before LMDB maps it; the lock file, which LMDB writes through a map, has its disk space before
that; the map grows only while no transaction is open, which the callers ensure by using one
environment from one thread at a time. Knows nothing of what is stored.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import lmdb

from sessionkv.errors import StoreUnavailable
from sessionkv.store.full_disk import is_full
from sessionkv.store.lacking_pages import num_lacking
from sessionkv.store.lmdb_layout import Unsound
from sessionkv.store.set_aside import move_aside

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# The structural check reads 430 to 1,160 MB/s, and a start is to take less than a second. Of larger
# files only the roots and lacking pages are checked; see docs/decisions/0005.
VERIFY_LIMIT_BYTES = 128 * 1024**2
_MAP_LIMIT_BYTES = 2**46
# Of the lock file: its header, and one slot for each reader but the first, who is in the header.
_LOCK_HEADER_BYTES, _READER_BYTES = 192, 64

DAMAGE = (
    lmdb.BadTxnError,
    lmdb.BadValsizeError,
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageFullError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)
"""What LMDB raises over a file whose structure is not what it wrote."""


def open_environment(
    path: Path, *, max_dbs: int, map_bytes: int = 2**30, max_readers: int = 126
) -> tuple[lmdb.Environment, Path | None]:
    """Open the environment in folder ``path``, made (0700) if need be.

    Args:
        path: Folder of ``data.mdb``.
        max_dbs: Named databases it will have.
        map_bytes: First size of the map: address space, not disk; grown on demand.
        max_readers: Reader slots of the lock file.

    Returns:
        The environment, and where a damaged one was moved to (None when there was none).

    Raises:
        StoreUnavailable: It cannot be opened for another reason than damage.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    data = path / "data.mdb"
    with opening(path):
        moved = None
        if data.exists() and (damage := _damage(data)):
            moved = _quarantine(path, damage)
        env = open_sound(path, max_dbs=max_dbs, map_bytes=map_bytes, max_readers=max_readers)
        env.reader_check()  # frees the slots of readers that were killed
    return env, moved


def check_environment(path: Path, *, whole: bool = False) -> str | None:
    """What is wrong with the environment in folder ``path``; None if nothing. Changes nothing.

    While nobody else has it open. With ``whole`` the structure of a large one is checked too.
    """
    data = path / "data.mdb"
    try:
        return _damage(data, limit_bytes=data.stat().st_size if whole else VERIFY_LIMIT_BYTES)
    except OSError as error:
        return str(error)


def open_sound(
    path: Path, *, max_dbs: int, map_bytes: int = 2**30, max_readers: int = 126
) -> lmdb.Environment:
    """Open the environment in folder ``path`` without checking it; else as above.

    Raises:
        lmdb.Error, OSError: It cannot be opened.
    """
    data = path / "data.mdb"
    known = data.stat().st_size if data.exists() else 0
    _allocate_lock(path, max_readers)
    return lmdb.open(
        str(path),
        map_size=max(map_bytes, 2 * known),
        max_dbs=max_dbs,
        max_readers=max_readers,
        mode=0o600,
    )


@contextmanager
def opening(path: Path) -> Iterator[None]:
    """Around whatever opens ``path``: an error of the disk becomes one of the store.

    Raises:
        StoreUnavailable: In its place.
    """
    try:
        yield
    except (lmdb.Error, OSError) as error:
        raise StoreUnavailable(
            f"{path} cannot be opened: {error}", retryable=is_full(error), directory=str(path)
        ) from error


def begin_read(env: lmdb.Environment) -> lmdb.Transaction:
    """A read transaction; slots of dead readers are cleared when none is free."""
    try:
        return env.begin()
    except lmdb.ReadersFullError:
        env.reader_check()
        return env.begin()


def write(
    env: lmdb.Environment,
    work: Callable[[lmdb.Transaction], _T],
    *,
    end_reading: Callable[[], None] | None = None,
) -> _T:
    """Run ``work`` in one write transaction, durable on return; it must be repeatable.

    A full map aborts the transaction, is doubled, and ``work`` runs again. What ``work`` raises
    aborts the transaction and is passed on.

    Args:
        env: Where.
        work: What.
        end_reading: Ends what other threads read, before the map grows: it moves under them.

    Raises:
        lmdb.Error: The disk is full or failed; nothing was changed.
    """
    while True:
        try:
            with env.begin(write=True) as txn:
                return work(txn)
        except lmdb.MapFullError:
            size = env.info()["map_size"]
            if size >= _MAP_LIMIT_BYTES:
                raise
            if end_reading is not None:
                end_reading()
            # No transaction is open here: ours was aborted, and this thread has no other.
            env.set_mapsize(2 * size)


def _allocate_lock(path: Path, max_readers: int) -> None:
    """Writing to a mapped file that has no disk space is a SIGBUS, not an error; so ask before.

    The size is LMDB's own: it takes a larger file for one with more readers.
    """
    fd = os.open(path / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, _LOCK_HEADER_BYTES + _READER_BYTES * (max_readers - 1))
    finally:
        os.close(fd)


def _damage(data: Path, limit_bytes: int = VERIFY_LIMIT_BYTES) -> str | None:
    """What is wrong with a data file, found without mapping it; None if nothing is known to be."""
    # Only here: it loads numpy, and with it OpenBLAS, which looks once at an environment that an
    # engine's process sets after it has imported this.
    from sessionkv.store.structure import check_structure

    size = data.stat().st_size
    if size == 0:
        return "the file is empty"
    try:
        if size <= limit_bytes:
            return check_structure(data)
        lacking = num_lacking(data)
    except Unsound as error:
        return str(error)
    return f"it has {size} bytes and lacks {lacking} pages" if lacking else None


def _quarantine(path: Path, damage: str) -> Path:
    """Move a damaged environment's folder aside and make an empty one."""
    moved = move_aside(path)
    path.mkdir(mode=0o700)
    _log.warning("the database %s is damaged (%s); it was moved to %s", path, damage, moved)
    return moved
