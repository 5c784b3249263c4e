"""The store directory: who may use it, and in which format it is.

    DIR/lock      held exclusively (flock) by the one engine that uses the directory; names its pid
    DIR/format    "sessionkv-store 3"
    DIR/journal/  turns, heads, idempotency keys (``store.journal``)
    DIR/blocks/   KV blocks, one folder for each KV identity (``store.block_store``)

Invariants: one holder at a time, in any process and through any spelling of the path; the lock goes
with its holder, however that ends; a directory that is not a store, or is one of a newer format, is
never written to. Knows nothing of what the journal and the block stores keep.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import weakref
from pathlib import Path

from sessionkv.errors import StoreError, StoreInUse, StoreUnavailable

FORMAT_VERSION = 3
_FORMAT_NAME = "sessionkv-store"


class StoreDirectory:
    """An exclusively locked store directory. Made by :meth:`open`; used from any thread.

    Attributes:
        path: Absolute, with links resolved.
    """

    def __init__(self, path: Path, lock_fd: int) -> None:
        """Take over a lock that is held; use :meth:`open`."""
        self.path = path
        self._pid = os.getpid()
        self._lock_fd = lock_fd
        # A child made by fork inherits the lock's file description and would hold the lock after
        # this process has died. The weak reference keeps the hook from holding the directory.
        drop = weakref.WeakMethod(self._drop_in_child)
        os.register_at_fork(after_in_child=lambda: (found := drop()) and found())

    @classmethod
    def open(cls, path: Path | str) -> StoreDirectory:
        """Create the directory if need be, lock it and check its format.

        A new store is 0700, made or found empty.

        Raises:
            StoreInUse: Somebody holds it; with directory and pid.
            StoreUnavailable: It cannot be created or written, is not a store, or is of a newer
                format; says what to do.
        """
        target = Path(path).expanduser().resolve()
        try:
            if target.exists() and not target.is_dir():
                raise StoreUnavailable(
                    f"the store cannot be used: {path} is a file, not a directory",
                    directory=str(target),
                )
            target.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_foreign(target)
            lock_fd = _lock(target / "lock", target)
        except OSError as error:
            raise StoreUnavailable(
                f"the store directory {target} cannot be used: {error.strerror}; "
                "choose another directory or correct its permissions",
                directory=str(target),
            ) from error
        try:
            _check_format(target)
            for folder in ("journal", "blocks"):
                (target / folder).mkdir(mode=0o700, exist_ok=True)
        except BaseException as error:
            os.close(lock_fd)
            if isinstance(error, OSError):
                raise StoreUnavailable(
                    f"the store directory {target} cannot be written: {error.strerror}",
                    directory=str(target),
                ) from error
            raise
        return cls(target, lock_fd)

    @property
    def journal_path(self) -> Path:
        """Folder of the journal."""
        return self.path / "journal"

    @property
    def blocks_path(self) -> Path:
        """Folder of the block stores."""
        return self.path / "blocks"

    def is_there(self) -> bool:
        """Whether it is still the one under its name: neither removed nor renamed. Any thread."""
        try:
            named, held = os.stat(self.path / "lock"), os.fstat(self._lock_fd)
        except OSError:
            return False
        return os.path.samestat(named, held)

    def check_process(self) -> None:
        """Refuse use in a child made by fork, where LMDB and the lock must not be touched.

        Raises:
            StoreError: In another process than the one that opened it, or after :meth:`close`.
        """
        if os.getpid() != self._pid:
            raise StoreError(
                f"the store {self.path} was opened by process {self._pid} and may not be used in "
                f"its fork {os.getpid()}",
                directory=str(self.path),
            )
        if self._lock_fd < 0:
            raise StoreError(f"the store {self.path} is closed", directory=str(self.path))

    def close(self) -> None:
        """Give the lock back; harmless when done already or in a fork."""
        if self._lock_fd >= 0 and os.getpid() == self._pid:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _drop_in_child(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> StoreDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_durably(path: Path, content: bytes) -> None:
    """Replace a small file so that after a power loss it has the old or the new content, whole."""
    draft = path.with_name(f"{path.name}.new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, content)
        os.fsync(fd)
    finally:
        os.close(fd)
    draft.rename(path)
    sync_folder(path.parent)


def disk_bytes(path: Path, pattern: str = "**/*") -> int:
    """Bytes of disk that the matching files below ``path`` take, as allocated, not as they seem."""
    total = 0
    for item in path.glob(pattern):
        try:
            found = item.lstat()
        except FileNotFoundError:  # LMDB and our own deletes may be quicker
            continue
        total += found.st_blocks * 512 if stat.S_ISREG(found.st_mode) else 0
    return total


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _refuse_foreign(target: Path) -> None:
    """A folder with other things in it is not made into a store by a mistyped path."""
    names = {entry.name for entry in target.iterdir()}
    if names and "format" not in names and names - {"lock", "format.new"}:
        raise StoreUnavailable(
            f"{target} holds other files and is not a sessionkv store; choose an empty directory",
            directory=str(target),
        )


def _lock(path: Path, target: Path) -> int:
    """Hold the lock file and put our pid into it; returns its descriptor."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        os.close(fd)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise StoreInUse(
            f"the store {target} is in use by process {holder or 'unknown'}; stop that engine or "
            "choose another directory",
            directory=str(target),
            pid=int(holder) if holder.isdigit() else None,
        ) from None
    return fd


def _check_format(target: Path) -> None:
    """Write the format file of a new store, or check that we can read this one."""
    path = target / "format"
    if not path.exists():
        found = target.stat()
        if found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) & 0o077:
            target.chmod(0o700)  # it was empty: nobody has used it for anything
        write_durably(path, f"{_FORMAT_NAME} {FORMAT_VERSION}\n".encode())
        return
    words = path.read_text("ascii", "replace").split()
    if len(words) < 2 or words[0] != _FORMAT_NAME or not words[1].isdigit():
        raise StoreUnavailable(
            f"{path} does not name a sessionkv store; choose another directory",
            directory=str(target),
        )
    if int(words[1]) < FORMAT_VERSION:
        # Before anything is written in the new format, so that an older program keeps away.
        write_durably(path, f"{_FORMAT_NAME} {FORMAT_VERSION}\n".encode())
    if int(words[1]) > FORMAT_VERSION:
        raise StoreUnavailable(
            f"the store {target} has format {words[1]}; this version reads formats up to "
            f"{FORMAT_VERSION}: upgrade sessionkv or choose another directory",
            directory=str(target),
            format=int(words[1]),
        )
