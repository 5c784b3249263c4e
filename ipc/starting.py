"""An engine that is there and does not answer yet: its socket is open long before its model is.

Whoever connects meanwhile waits in the socket's backlog. Which process it is says the endpoint's
lock file.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import zmq

from sessionkv.config import LimitsConfig
from sessionkv.errors import ConnectionLost
from sessionkv.ipc.codec import encode_request
from sessionkv.ipc.endpoint import is_listening, socket_path
from sessionkv.ipc.messages import Bye, Hello

_GOODBYE_MS = 100
STARTING = "starting_pid"
"""Detail of a :class:`ConnectionLost`: the process that is there and has not answered yet."""


def serving_pid(endpoint: str) -> int | None:
    """Process that holds an endpoint by its lock file; None where none lives.

    Raises:
        ConfigError: The endpoint is not one.
    """
    try:
        text = Path(f"{socket_path(endpoint)}.lock").read_text("ascii", "replace").strip()
        pid = int(text)
        os.kill(pid, 0)
    except (OSError, ValueError, OverflowError):
        return None
    return pid


def not_answering(endpoint: str) -> ConnectionLost | None:
    """Why a greeting there has no answer, where that is because an engine still starts."""
    pid = serving_pid(endpoint) if is_listening(endpoint) else None
    if pid is None:
        return None
    return ConnectionLost(
        f"an engine (pid {pid}) is at {endpoint} and still starting: it does not answer yet",
        endpoint=endpoint,
        **{STARTING: pid},
    )


def answers(endpoint: str, *, timeout_s: float) -> bool:
    """Whether an engine answers a greeting in time. Cost: one connection.

    Raises:
        ConfigError: The endpoint is not one.
    """
    socket_path(endpoint)
    limits = LimitsConfig()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.linger = 0  # of its sockets
    try:
        socket = context.socket(zmq.DEALER)
        socket.connect(endpoint)
        socket.send(encode_request(Hello(0, client="probe"), limits))
        heard = bool(socket.poll(math.ceil(timeout_s * 1000)))
        if heard:
            socket.linger = _GOODBYE_MS
            socket.send(encode_request(Bye(1), limits))
        return heard
    finally:
        context.destroy()  # an interrupt may have come before any line: sockets that are open too
