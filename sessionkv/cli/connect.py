"""A client of the engine that the command line names, or of the user's own."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sessionkv.cli import output
from sessionkv.errors import ConfigError, ConnectionLost

if TYPE_CHECKING:
    from sessionkv.client import Client

_AT_ONCE_S = 0.5
"""An engine that is ready answers sooner; for one that is busy with a step this is short."""
_LOOK_S = 2.0
"""How often one that starts is asked again."""


def connect(args: argparse.Namespace) -> Client:
    """A client of ``--endpoint``, else of the user's default socket; waits for one that starts.

    Raises:
        ConnectionLost: No engine answers there.
    """
    from sessionkv.client import Client
    from sessionkv.ipc.endpoint import default_endpoint

    endpoint = args.endpoint or default_endpoint()
    wait_for_start(endpoint)
    return Client(endpoint, key=_key(args), tenant=getattr(args, "tenant", None))


def _key(args: argparse.Namespace) -> str | None:
    """The key of ``--key-file``; not on the command line, which others can see.

    Raises:
        ConfigError: The file cannot be read.
    """
    path = getattr(args, "key_file", None)
    if path is None:
        return None
    try:
        return Path(path).read_text().strip()
    except (OSError, ValueError) as error:
        raise ConfigError("--key-file", path, f"a readable file ({error})") from None


def wait_for_start(endpoint: str) -> None:
    """Wait while an engine is there that has not loaded its model yet, and say so.

    Raises:
        ConnectionLost: It ended before it was ready.
    """
    from sessionkv.ipc.endpoint import is_listening
    from sessionkv.ipc.starting import answers, serving_pid

    if not is_listening(endpoint) or answers(endpoint, timeout_s=_AT_ONCE_S):
        return
    pid = serving_pid(endpoint)
    if pid is None:
        return
    output.stderr().print(f"waiting for the engine (pid {pid}) to start ...", style="dim")
    while not answers(endpoint, timeout_s=_LOOK_S):
        if serving_pid(endpoint) != pid or not is_listening(endpoint):
            raise ConnectionLost(f"the engine (pid {pid}) ended before it was ready ({endpoint})")
