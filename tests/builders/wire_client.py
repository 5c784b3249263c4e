"""A client of nothing but frames, for tests that say exactly what goes over the wire and when."""

from __future__ import annotations

from typing import Any

import msgpack
import zmq


class WireClient:
    """One DEALER connection. It greets; it pings only when told to.

    Attributes:
        welcome: The engine's answer to the greeting, None before :meth:`hello`.
    """

    def __init__(self, endpoint: str, *, hello: bool = True, **options: int) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 30_000
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(endpoint)
        self.welcome: dict[str, Any] | None = None
        if hello:
            self.welcome = self.call("hello", 0)

    def send(self, kind: str, request_id: int, **fields: Any) -> None:
        self.socket.send(msgpack.packb({"v": 1, "t": kind, "id": request_id, **fields}))

    def receive(self) -> dict[str, Any]:
        return msgpack.unpackb(self.socket.recv(), strict_map_key=False)

    def until(self, request_id: int) -> list[dict[str, Any]]:
        """Replies to one request, up to its terminal one; those to others are dropped."""
        replies: list[dict[str, Any]] = []
        while not replies or replies[-1]["t"] in ("delta", "restarted"):
            reply = self.receive()
            if reply["id"] == request_id:
                replies.append(reply)
        return replies

    def call(self, kind: str, request_id: int, **fields: Any) -> dict[str, Any]:
        """Send, and the terminal reply."""
        self.send(kind, request_id, **fields)
        return self.until(request_id)[-1]

    def close(self) -> None:
        self.socket.close()
        self._context.term()

    def __enter__(self) -> WireClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
