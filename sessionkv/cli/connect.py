"""A client of the engine that the command line names, or of the user's own."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sessionkv.client import Client


def connect(args: argparse.Namespace) -> Client:
    """A client of ``--endpoint``, else of the user's default socket.

    Raises:
        ConnectionLost: No engine answers there.
    """
    from sessionkv.client import Client

    return Client(args.endpoint) if args.endpoint else Client()
