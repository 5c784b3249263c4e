"""A served engine whose core reads a link, as in ``serve``, on threads of this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sessionkv.actor.front_link import MAX_UNSENT_BYTES, CoreEnd, FrontEnd, link_codec
from sessionkv.actor.front_setup import build_front
from sessionkv.actor.host import CoreHost
from sessionkv.actor.socket_loop import SocketLoop
from sessionkv.config import EngineConfig
from sessionkv.ipc.frames import FrameSocket
from sessionkv.ipc.server import RouterServer
from sessionkv.types import StepPlan
from tests.builders.engine import Building, SocketEngine

SMALL_BYTES = 8192
"""Asked of the kernel for what the front has said and core has not read."""


@contextmanager
def linked_engine(
    folder: Path,
    config: EngineConfig,
    gate: Callable[[StepPlan], None],
    *,
    max_unsent_bytes: int = MAX_UNSENT_BYTES,
) -> Iterator[tuple[SocketEngine, FrontEnd]]:
    """An engine at ``ipc://folder/e.sock`` and the front's end of its link.

    Core's process always counts as alive: nobody gives signs of life here.

    Args:
        folder: Of the socket.
        config: The engine's.
        gate: Called with each plan before it is executed.
        max_unsent_bytes: Of the front's end.
    """
    building = Building(gate=gate)
    ours, theirs = FrameSocket.pair()
    with (
        ours,
        FrameSocket(theirs) as frames,
        RouterServer(f"ipc://{folder}/e.sock", config.limits) as server,
    ):
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BYTES)
        core_end = CoreEnd(ours, link_codec())
        front_end = FrontEnd(frames, link_codec(), silence_s=1e9, max_unsent_bytes=max_unsent_bytes)
        host = CoreHost(building(config), config, core_end, source=core_end)
        server.watch(frames.fd)
        loop = SocketLoop(build_front(host.setup), server, front_end, config.limits)
        thread = threading.Thread(target=loop.run, name="front")
        host.start()
        thread.start()
        try:
            yield SocketEngine(server.endpoint, building, loop, host), front_end
        finally:
            host.drain()
            thread.join(30)
            assert not thread.is_alive(), "the engine did not stop"
            host.close()
