"""A copy of the journal without its free pages, made beside it while it goes on.

The copy is of one moment; what is committed later is kept in a list and made up for before the copy
takes the journal's place. Until its file is renamed over the journal's, the journal is as if
nothing had happened, and a copy that is found at a start is thrown away. Must not know of records.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import lmdb

from sessionkv.store.environment import begin_read
from sessionkv.types import JournalOp

_log = logging.getLogger(__name__)

MAX_CHANGES = 65_536
"""Operations that a copy may lag behind; one that lags more is given up."""


class JournalCopy:
    """One copy under way. Made, asked and ended by the journal's thread; copied by its own."""

    def __init__(self, env: lmdb.Environment, folder: Path) -> None:
        """Take the moment and start.

        Raises:
            OSError: The folder cannot be made.
        """
        remove_copy(folder)
        folder.mkdir(mode=0o700)
        self.folder = folder
        self.changes: list[Sequence[JournalOp]] = []
        self.error: Exception | None = None
        self._num_changes = 0
        self._env = env
        self._moment = begin_read(env)
        self._thread = threading.Thread(target=self._copy, name="store-journal-copy", daemon=True)
        self._thread.start()

    @property
    def data(self) -> Path:
        """File of the copy."""
        return self.folder / "data.mdb"

    @property
    def is_done(self) -> bool:
        """Whether it is made, or has failed."""
        return not self._thread.is_alive()

    @property
    def lags(self) -> bool:
        """Whether too much was committed since."""
        return self._num_changes > MAX_CHANGES

    def note(self, batches: Iterable[Sequence[JournalOp]]) -> None:
        """Changes committed after the moment, in order."""
        for batch in batches:
            self.changes.append(batch)
            self._num_changes += len(batch)

    def end(self, timeout_s: float | None = None) -> bool:
        """Wait until the copying thread is done with the environment; whether it is."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._moment.abort()
        return True

    def _copy(self) -> None:
        try:
            # Not by path: LMDB would let others read the file.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open(self.data, flags, 0o600)
            try:
                self._env.copyfd(fd, compact=True, txn=self._moment)
                os.fsync(fd)
            finally:
                os.close(fd)
        except (lmdb.Error, OSError) as error:
            self.error = error


def remove_copy(folder: Path) -> None:
    """Delete a copy, whole or not, if there is one."""
    shutil.rmtree(folder, ignore_errors=True)
