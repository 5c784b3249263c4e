"""Notices, before LMDB touches its maps, that somebody else took its files away or cut them short.

Reading a mapped page that its file lost ends the process by SIGBUS. LMDB never shortens a file, so
one that is shorter than it was seen before was cut by another. Between the check and the end of the
transaction nothing can guard a map: files of a running store must be left alone.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import lmdb

_log = logging.getLogger(__name__)


class FileGuard:
    """Watches the two files of an open environment. For the environment's thread.

    Attributes:
        is_cut: Whether a file was found cut short; the map must not be touched any more then.
    """

    def __init__(self, folder: Path) -> None:
        """Remember the files as they are, just opened.

        Raises:
            OSError: One cannot be looked at.
        """
        self.is_cut = False
        self._data = _Seen(folder / "data.mdb")
        self._lock = _Seen(folder / "lock.mdb")

    def check(self) -> None:
        """To be called before each transaction; two calls of the system.

        Raises:
            lmdb.CorruptedError: A file was cut short, now or earlier.
        """
        was_cut = self.is_cut
        if self._lock.is_cut():
            # LMDB writes to it when it closes; a hole in its place is enough for that.
            os.truncate(self._lock.path, self._lock.size)
            self.is_cut = True
        self.is_cut = self._data.is_cut() or self.is_cut
        if self.is_cut:
            what = f"the files of {self._data.path.parent} were cut short by another program"
            if not was_cut:
                _log.error("%s and are not used any more", what)
            raise lmdb.CorruptedError(what)

    def note(self) -> None:
        """To be called after a transaction that wrote: the file may be longer now."""
        self._data.is_cut()

    def is_there(self) -> bool:
        """Whether the data file is whole, and still the one under its name."""
        return not self.is_cut and self._data.is_there() and not self._data.is_cut()


class _Seen:
    """A file as it was last looked at, by its name."""

    def __init__(self, path: Path) -> None:
        found = path.stat()
        self.path = path
        self.size = found.st_size
        self._id = found.st_dev, found.st_ino

    def is_cut(self) -> bool:
        """Whether it is shorter than it was; one without that name is not: its map is whole."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        if (found.st_dev, found.st_ino) != self._id:
            return False
        self.size, before = max(self.size, found.st_size), self.size
        return found.st_size < before

    def is_there(self) -> bool:
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._id
