"""Starts the processes that belong to core's: the front and the gateway."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from sessionkv.errors import EngineStartFailed


def start_module(module: str, fds: Sequence[int], *, name: str) -> subprocess.Popen[bytes]:
    """Run a module of this package with file descriptors, whose numbers are its arguments.

    Args:
        module: Its full name.
        fds: Passed on; the caller closes its own.
        name: What it is to people.

    Raises:
        EngineStartFailed: There can be no other process.
    """
    try:
        return subprocess.Popen(
            [sys.executable, "-m", module, *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is core's process's to handle
        )
    except OSError as error:
        raise EngineStartFailed(f"{name} could not be started ({error})") from None
