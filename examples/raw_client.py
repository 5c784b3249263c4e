"""A client with nothing but pyzmq and msgpack, following docs/protocol.md.

Usage: python examples/raw_client.py [ENDPOINT] [SESSION] [TEXT]

Greets the engine, opens a session, streams one turn and prints what the engine's metrics are
called. Without ENDPOINT it asks the engine that ``sessionkv serve`` started.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import zmq

HEARTBEAT_S = 1.0
PATIENCE_S = 3.0


def default_endpoint() -> str:
    """Where ``sessionkv serve`` listens (for paths that fit a socket; see the protocol)."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = f"{base}/sessionkv" if base else f"/tmp/sessionkv-{os.getuid()}"
    return f"ipc://{folder}/engine.sock"


class Connection:
    """One DEALER socket, one request at a time."""

    def __init__(self, endpoint: str) -> None:
        """Connect and greet."""
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 200
        self.socket.connect(endpoint)
        self.next_id = 0
        self.consumed = 0
        self.last_ping = time.monotonic()
        self.last_heard = time.monotonic()
        self.welcome = self.ask("hello", version=1, client="raw_client.py")

    def send(self, kind: str, **fields: Any) -> int:
        """Send one request; returns its id."""
        request_id, self.next_id = self.next_id, self.next_id + 1
        self.socket.send(msgpack.packb({"v": 1, "t": kind, "id": request_id, **fields}))
        return request_id

    def replies(self, request_id: int) -> Iterator[dict[str, Any]]:
        """Replies to one request, the terminal one last; heartbeats go on meanwhile."""
        while True:
            now = time.monotonic()
            if now - self.last_heard > PATIENCE_S:
                raise SystemExit("the engine is silent")
            if now - self.last_ping > HEARTBEAT_S:
                self.last_ping = now
                self.send("ping", consumed=self.consumed)
            if not self.socket.poll(200):
                continue
            reply = msgpack.unpackb(self.socket.recv(), strict_map_key=False)
            self.last_heard = time.monotonic()
            if reply["t"] == "error" and reply["code"] == "connection_lost":
                raise SystemExit("the engine does not know this connection any more")
            if reply["id"] != request_id:  # the answer to a ping
                continue
            yield reply
            if reply["t"] == "delta":
                self.consumed += 1
            elif reply["t"] != "restarted":
                return

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Send one request and return its terminal reply."""
        *_, reply = self.replies(self.send(kind, **fields))
        if reply["t"] == "error":
            raise SystemExit(f"{reply['code']}: {reply['message']}")
        return reply

    def close(self) -> None:
        """Say goodbye."""
        self.send("bye")
        self.socket.close()


def where_from(cache: dict[str, Any]) -> str:
    """The cache report in one line."""
    tiers = [f"{cache[f'{tier}_tokens']} from {tier}" for tier in ("device", "host", "disk")]
    total, computed = cache["prompt_tokens"], cache["computed_tokens"]
    return f"prompt {total} tokens: {', '.join(tiers)}, {computed} computed"


def main(
    endpoint: str | None = None, session: str = "raw", text: str = "Name three primary colours."
) -> None:
    """Hello, open, one streaming turn, stats."""
    connection = Connection(endpoint or default_endpoint())
    welcome = connection.welcome
    print(f"connected to {welcome['engine']} (pid {welcome['pid']}), model {welcome['model']}")

    info = connection.ask("open", session=session)["value"]
    print(f"session {info['name']}: {info['turns']} turns, {info['tokens']} tokens")

    sampling = {"temperature": 0.0, "max_tokens": 64}
    turn = connection.send("turn", session=session, text=text, sampling=sampling, stream=True)
    shown = 0
    for reply in connection.replies(turn):
        if reply["t"] == "restarted":
            shown = 0
        elif reply["t"] == "delta":
            print(reply["text"], end="", flush=True)
            shown += len(reply["text"])
        elif reply["t"] == "error":
            raise SystemExit(f"{reply['code']}: {reply['message']}")
        else:
            print(reply["text"][shown:])
            print(f"[{reply['finish_reason']}] {where_from(reply['cache'])}")

    stats = connection.ask("stats")["value"]
    print("stats:", ", ".join(sorted(stats)))
    connection.close()


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
    else:
        main(*sys.argv[1:])
