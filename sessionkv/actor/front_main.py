"""Entry of the front's process: ``python -m sessionkv.actor.front_main LINK_FD LISTENER_FD``.

Started by core's process and for it alone: it ends when core has stopped, and at once when the
other end of the link closes. Signals are core's to handle. Loads the libraries of sockets and text,
none that computes and none of the store.
"""

import signal

if __name__ == "__main__":
    # A service manager's SIGTERM may reach every process: the engine is to drain, not to lose this
    # one. Before anything is loaded, since that takes a while.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

import gc
import os
import socket
import sys
import threading

from sessionkv.actor.front_link import FrontEnd, FrontEnded, FrontStarted, StartFront, link_codec
from sessionkv.actor.front_setup import build_front
from sessionkv.actor.socket_loop import SocketLoop
from sessionkv.errors import ConnectionLost, SessionKVError
from sessionkv.ipc.frames import FrameSocket, wait_for_end
from sessionkv.ipc.records import RecordCodec
from sessionkv.ipc.server import RouterServer


def _end_with_core(fd: int) -> None:
    wait_for_end(fd)
    os._exit(1)  # nobody is left to be answered, whatever the front is doing


def main() -> int:
    """Serve until core has stopped; 1 when it is gone before."""
    link, listener = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:3])
    with listener, FrameSocket(link) as frames:
        threading.Thread(
            target=_end_with_core, args=(frames.fd,), name="link-end", daemon=True
        ).start()
        codec = link_codec()
        try:
            return _serve(frames, codec, _first(frames, codec), listener)
        except ConnectionLost:
            return 1


def _first(frames: FrameSocket, codec: RecordCodec) -> StartFront:
    """Core's first words, which come when the model is loaded."""
    while True:
        for frame in frames.receive():
            start: StartFront
            (start,) = codec.decode(frame)
            return start


def _serve(
    frames: FrameSocket, codec: RecordCodec, start: StartFront, listener: socket.socket
) -> int:
    limits = start.setup.limits
    with RouterServer(start.endpoint, limits, listener=listener) as server:
        try:
            front = build_front(start.setup)
        except SessionKVError as error:
            frames.send(codec.encode([FrontStarted(error)]))
            return 1
        gc.collect()
        gc.freeze()  # what was made so far lives as long as the process
        # What core has to know before it serves anything goes with the word that it may begin.
        frames.send(codec.encode([FrontStarted(), *front.to_core]))
        front.to_core.clear()
        server.watch(frames.fd)
        link = FrontEnd(frames, codec, silence_s=limits.heartbeat_s)
        SocketLoop(front, server, link, limits).run()
        frames.send(codec.encode([FrontEnded()]))
        return 0


if __name__ == "__main__":
    sys.exit(main())
