"""Segment files: fixed-size slots for records, allocated one by one and given back one by one.

A slot number names a place for good: segment ``slot // slots_per_segment``, and in it offset
``slot % slots_per_segment`` times the slot's size. Files are sparse: a slot takes disk space from
:meth:`SegmentFiles.allocate` until :meth:`SegmentFiles.punch`, whatever was in it before.

Must not know which slots are in use; the block store does. :meth:`SegmentFiles.read`,
:meth:`~SegmentFiles.write` and :meth:`~SegmentFiles.sync` may run on several threads at once, on
different slots; the rest is for the owner's thread. Files stay open until :meth:`close`, so nobody
works on a descriptor that was given away.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from sessionkv.store.directory import sync_folder

# Large, so that a store has few files; they are sparse, so their size costs nothing.
SEGMENT_BYTES = 2**33
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)
_MAX_BUFFERS = 1024  # of one preadv(2)
_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE of sync_file_range(2)


class SegmentFiles:
    """The segment files in one folder."""

    def __init__(self, folder: Path, slot_bytes: int) -> None:
        """Look at the files that are there; makes none."""
        self.slots_per_segment = max(1, SEGMENT_BYTES // slot_bytes)
        self._folder = folder
        self._slot_bytes = slot_bytes
        self._lock = threading.Lock()  # over the three below
        self._files: dict[int, int] = {}
        self._unsynced: set[int] = set()
        self._unmeasured = {int(path.stem[8:]) for path in folder.glob("segment-*.kv")}
        self._numbers = set(self._unmeasured)
        self._disk_bytes: dict[int, int] = {}
        libc = ctypes.CDLL(None, use_errno=True)
        self._fallocate = libc.fallocate
        self._fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        self._start_writing = getattr(libc, "sync_file_range", None)
        if self._start_writing is not None:
            self._start_writing.argtypes = (
                ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
            )  # fmt: skip

    def used_bytes(self) -> int:
        """Bytes of disk that all files take; only files that changed are asked again."""
        with self._lock:
            changed = set(self._unmeasured)
            self._unmeasured = set(self._unsynced)  # writing them back may change their size
        for number in changed:
            path = self._path(number)
            self._disk_bytes[number] = path.stat().st_blocks * 512 if path.exists() else 0
        return sum(self._disk_bytes.values())

    def allocate(self, slot: int) -> None:
        """Give the slot disk space, so that writing it cannot find the disk full.

        Raises:
            OSError: ENOSPC among others.
        """
        number, offset = self._place(slot)
        is_new = number not in self._numbers
        fd = self._open(number, create=True)
        self._changed(number)
        os.posix_fallocate(fd, offset, self._slot_bytes)
        if is_new:
            sync_folder(self._folder)

    def punch(self, slot: int, count: int = 1) -> bool:
        """Give back the disk space of ``count`` slots of one segment; False where unsupported."""
        number, offset = self._place(slot)
        if number not in self._numbers:
            return True
        mode = _KEEP_SIZE | _PUNCH_HOLE
        self._changed(number)
        if self._fallocate(self._open(number), mode, offset, count * self._slot_bytes) == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        raise OSError(code, os.strerror(code), str(self._path(number)))

    def truncate(self, end_slot: int) -> None:
        """Drop everything from ``end_slot`` on; called before anything is written or read."""
        last, offset = self._place(end_slot)
        for number in sorted(self._numbers):
            if number > last or (number == last and offset == 0):
                self._path(number).unlink()
                self._numbers.discard(number)
            elif number == last:
                size = self._path(number).stat().st_size
                os.ftruncate(self._open(number), min(offset, size))

    def write(self, slot: int, buffers: Sequence[bytes | memoryview]) -> None:
        """Write buffers one after another from the slot's start; durable after :meth:`sync`.

        The disk is told to start at once, so that it works while the next slot is filled.

        Raises:
            OSError: The slot may hold anything now.
        """
        number, offset = self._place(slot)
        fd = self._open(number)
        with self._lock:
            self._unsynced.add(number)
            self._unmeasured.add(number)
        left = [memoryview(buffer).cast("B") for buffer in buffers]
        start = offset
        while left:
            done = os.pwritev(fd, left, offset)
            offset += done
            left = _rest(left, done)
        if self._start_writing is not None:
            self._start_writing(fd, start, offset - start, _START_WRITING)  # a hint: may fail

    def read(self, slot: int, buffers: Sequence[bytearray | memoryview]) -> bool:
        """Fill buffers one after another from the slot's start; False when the file is too short.

        Raises:
            OSError: The device failed.
        """
        number, offset = self._place(slot)
        if number not in self._numbers:
            return False
        try:
            fd = self._open(number)
        except FileNotFoundError:
            return False
        left = [memoryview(buffer).cast("B") for buffer in buffers]
        while left:
            done = os.preadv(fd, left[:_MAX_BUFFERS], offset)
            if done == 0:
                return False
            offset += done
            left = _rest(left, done)
        return True

    def adjoin(self, slot: int, other: int) -> bool:
        """Whether ``other`` begins where ``slot`` ends, in the same file."""
        return other == slot + 1 and other % self.slots_per_segment != 0

    def sync(self) -> None:
        """Make the writes that have returned durable."""
        with self._lock:
            numbers, self._unsynced = sorted(self._unsynced), set()
            self._unmeasured.update(numbers)
        for number in numbers:
            os.fdatasync(self._open(number))

    def are_there(self) -> bool:
        """Whether the files in use are still those under their names. One call of the system each.

        For the owner's thread.
        """
        with self._lock:
            files = dict(self._files)
        try:
            return all(
                os.path.samestat(os.stat(self._path(number)), os.fstat(fd))
                for number, fd in files.items()
            )
        except OSError:
            return False

    def close(self) -> None:
        """Close all files; nobody reads or writes any more."""
        with self._lock:
            for fd in self._files.values():
                os.close(fd)
            self._files.clear()

    def _changed(self, number: int) -> None:
        with self._lock:
            self._unmeasured.add(number)

    def _place(self, slot: int) -> tuple[int, int]:
        number, index = divmod(slot, self.slots_per_segment)
        return number, index * self._slot_bytes

    def _path(self, number: int) -> Path:
        return self._folder / f"segment-{number:06d}.kv"

    def _open(self, number: int, *, create: bool = False) -> int:
        with self._lock:
            fd = self._files.get(number)
            if fd is None:
                flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
                fd = self._files[number] = os.open(self._path(number), flags, 0o600)
                self._numbers.add(number)
            return fd


def _rest(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the buffers after ``done`` bytes."""
    while buffers and done >= len(buffers[0]):
        done -= len(buffers[0])
        buffers = buffers[1:]
    return [buffers[0][done:], *buffers[1:]] if done else buffers
