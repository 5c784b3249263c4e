"""Files that the command line reads and writes: whole or not at all, and nobody else's to read."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from sessionkv.errors import StoreError

STDIO = "-"


@contextmanager
def new_file(name: str) -> Iterator[BinaryIO]:
    """A file (0600) that has its name once the block ends without an error; ``-`` is the output.

    Written beside its place under another name, flushed to disk, then renamed over what was there.

    Raises:
        StoreError: It cannot be written.
    """
    if name == STDIO:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(name)
    try:
        fd, draft = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise _failed("written", name, error) from error
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(draft).replace(path)
    except OSError as error:
        raise _failed("written", name, error) from error
    finally:
        Path(draft).unlink(missing_ok=True)


@contextmanager
def old_file(name: str) -> Iterator[BinaryIO]:
    """A file to read that can be sought; ``-`` is the input, copied aside first.

    Raises:
        StoreError: It cannot be read.
    """
    try:
        if name == STDIO:
            with tempfile.TemporaryFile() as copy:
                shutil.copyfileobj(sys.stdin.buffer, copy)
                yield copy
        else:
            with Path(name).open("rb") as file:
                yield file
    except OSError as error:
        raise _failed("read", name, error) from error


def _failed(what: str, name: str, error: OSError) -> StoreError:
    return StoreError(f"{name} cannot be {what}: {error.strerror or error}")
