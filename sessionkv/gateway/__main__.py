"""Entry of the gateway's process: ``python -m sessionkv.gateway LINK_FD LISTENER_FD``.

Started by the engine's process and for it alone. Over the link it reads its settings, one line of
JSON, and writes ``ready``; it ends when the link's other end closes. Signals are the engine's to
handle.
"""

import signal

if __name__ == "__main__":
    # A service manager's SIGTERM may reach every process: open answers are to end with the engine.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

import asyncio
import json
import logging
import socket
import sys

import uvloop

from sessionkv.gateway.server import GatewayServer
from sessionkv.gateway.settings import GatewaySettings


def main() -> int:
    """Serve until the engine's process ends or says so; 1 when the engine cannot be reached."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # What it warns of is what clients send that is no HTTP: nothing that the log should fill with.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    link, listener = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:3])
    with listener, link, link.makefile("rb") as lines:
        line = lines.readline()
        if not line:
            return 1
        settings = GatewaySettings.from_map(json.loads(line))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return 0 if runner.run(_serve(settings, link, listener)) else 1


async def _serve(settings: GatewaySettings, link: socket.socket, listener: socket.socket) -> bool:
    """Whether requests were ever taken."""
    server = GatewayServer(settings, on_ready=lambda: link.sendall(b"ready\n"))

    def ended() -> None:
        loop.remove_reader(link)
        server.should_exit = True

    loop = asyncio.get_running_loop()
    loop.add_reader(link, ended)
    await server.serve(sockets=[listener])
    return server.started


if __name__ == "__main__":
    sys.exit(main())
