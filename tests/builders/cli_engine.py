"""An engine without a model: the real socket and codec, scripted answers.

``FakeEngine`` serves in a thread. Turns are answered by ``answer(request)``, a list of replies sent
at once; an empty list leaves the turn open for the test to end with :meth:`FakeEngine.send`, or the
client with a cancel. Everything the engine received is in ``requests``, in order.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sessionkv.config import LimitsConfig
from sessionkv.errors import ConnectionLost, RequestError
from sessionkv.ipc import messages as m
from sessionkv.ipc.codec import decode_request, encode_reply
from sessionkv.ipc.limits import limits_to_map
from sessionkv.ipc.outbox import Outbox
from sessionkv.ipc.server import RouterServer

USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
CACHE = {
    "prompt_tokens": 3,
    "device_tokens": 1,
    "host_tokens": 0,
    "disk_tokens": 0,
    "computed_tokens": 2,
    "miss": {"reason": "first_turn", "token": 0},
}
INFO = {
    "name": "trip",
    "node": "7",
    "turns": 1,
    "tokens": 5,
    "kind": "chat",
    "history": "keep",
    "created_s": 1.0,
    "updated_s": 2.0,
    "pin": {"tier": "host", "expires_s": 9.0, "priority": 50},
    "bytes": {"device": {"exclusive": 10, "shared": 20}},
    "running": False,
    "queued": 0,
    "last_cache": CACHE,
    "messages": [{"role": "user", "content": "hi"}],
}

Answer = Callable[[m.Request], Sequence[m.Reply]]


@contextlib.contextmanager
def short_endpoint() -> Iterator[str]:
    """An endpoint in a folder of its own whose path fits a socket."""
    folder = Path(tempfile.mkdtemp(prefix="skv-", dir="/tmp"))
    try:
        yield f"ipc://{folder}/engine.sock"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def done(request_id: int, text: str = "ok", **fields: object) -> m.Done:
    """A terminal event whose tokens are the characters' code points."""
    tokens = [ord(c) for c in text]
    return m.Done(
        request_id, **{"text": text, "tokens": tokens, "usage": USAGE, "cache": CACHE, **fields}
    )


def deltas(request_id: int, text: str, *, start: int = 0, attempt: int = 1) -> list[m.Delta]:
    """One delta for each character."""
    return [
        m.Delta(request_id, attempt=attempt, offset=start + i, tokens=[ord(c)], text=c)
        for i, c in enumerate(text)
    ]


def echo(request: m.Request) -> list[m.Reply]:
    """The turn's own text back, character by character where it streams; ``hold`` stays open."""
    text = getattr(request, "text", None) or getattr(request, "prompt", None) or "ok"
    if text == "hold":
        return []
    pieces = deltas(request.id, text) if request.stream else []
    return [*pieces, done(request.id, text)]


def control(request: m.Request) -> object:
    """Value of the result of a request that is not a turn."""
    if isinstance(request, m.Close):
        return {"closed": True}
    if isinstance(request, m.List):
        names = [n for n in ("a1", "a2", "b1") if n.startswith(request.prefix)]
        left = [n for n in names if request.after is None or n > request.after]
        return {
            "sessions": [{**INFO, "name": n} for n in left[:2]],
            "next": left[1] if len(left) > 2 else None,
        }
    if isinstance(request, m.Flush | m.Stats):
        return {"blocks": 3}
    return {**INFO, "name": getattr(request, "session", "")}


class FakeEngine:
    """One engine at one endpoint; a context manager that ends it by closing.

    Attributes:
        requests: What was received, as (connection, request); hellos and pings too.
        malformed: Errors of frames that were refused.
        threads: Ids of the threads that touched the socket.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        answer: Answer = echo,
        limits: LimitsConfig | None = None,
        send_hwm: int = 4096,
    ) -> None:
        self.endpoint = endpoint
        self.limits = limits or LimitsConfig()
        self.requests: list[tuple[bytes, m.Request]] = []
        self.malformed: list[RequestError] = []
        self.mute = threading.Event()
        self._answer = answer
        self._send_hwm = send_hwm
        self._outboxes: dict[bytes, Outbox] = {}
        self._open: dict[tuple[bytes, int], m.Request] = {}
        self._to_send: deque[tuple[bytes, m.Reply]] = deque()
        self._changed = threading.Condition()
        self._stop = False
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake-engine")

    def __enter__(self) -> FakeEngine:
        self._thread.start()
        if not self._started.wait(10):
            raise TimeoutError("the fake engine did not start")
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it; clients get no goodbye."""
        self._stop = True
        if self._started.is_set():
            self._server.wake()
        self._thread.join(10)

    def send(self, conn_id: bytes, reply: m.Reply) -> None:
        """Send from the test's thread."""
        self._to_send.append((conn_id, reply))
        self._server.wake()

    def wait_for(
        self, kind: type[m.Request], count: int = 1, timeout_s: float = 20.0
    ) -> list[tuple[bytes, m.Request]]:
        """Wait until so many requests of a class came, and return them."""

        def found() -> list[tuple[bytes, m.Request]]:
            return [item for item in self.requests if isinstance(item[1], kind)]

        with self._changed:
            if not self._changed.wait_for(lambda: len(found()) >= count, timeout_s):
                raise TimeoutError(f"{len(found())} of {count} {kind.__name__} came")
            return found()

    def _run(self) -> None:
        with RouterServer(self.endpoint, self.limits, send_hwm=self._send_hwm) as server:
            self._server = server
            self._started.set()
            while not self._stop:
                for conn_id, frames in server.poll(0.05):
                    self._receive(conn_id, frames)
                while self._to_send:
                    conn_id, reply = self._to_send.popleft()
                    self._push(conn_id, reply)
                now = time.monotonic()
                for conn_id in list(self._outboxes):
                    for request_id in self._outboxes[conn_id].overdue(now):
                        self._push(conn_id, _failure(request_id, "slow_reader", "unread"))
                    self._drain(conn_id)

    def _receive(self, conn_id: bytes, frames: list[bytes]) -> None:
        try:
            request = decode_request(frames, self.limits)
        except RequestError as error:
            self.malformed.append(error)
            self._push(conn_id, _failure(error.request_id, error.code, error.message))
            return
        with self._changed:
            self.requests.append((conn_id, request))
            self._changed.notify_all()
        if not self.mute.is_set():
            for reply in self._replies(conn_id, request):
                self._push(conn_id, reply)

    def _replies(self, conn_id: bytes, request: m.Request) -> Sequence[m.Reply]:
        now = time.monotonic()
        if isinstance(request, m.Hello):
            self._outboxes[conn_id] = Outbox(
                self.limits.unread_events, timeout_s=self.limits.unread_timeout_s
            )
            return [m.Welcome(request.id, engine="fake", limits=limits_to_map(self.limits))]
        if conn_id not in self._outboxes:
            return [_failure(request.id, "connection_lost", "say hello first")]
        if isinstance(request, m.Ping):
            self._outboxes[conn_id].consumed(request.consumed, now)
            return [m.Result(request.id)]
        if isinstance(request, m.Bye):
            self._outboxes.pop(conn_id)
            return []
        if isinstance(request, m.Cancel):
            found = self._open.pop((conn_id, request.request), None)
            replies: list[m.Reply] = [m.Result(request.id, {"found": found is not None})]
            if found is not None and request.keep:
                replies.insert(0, done(found.id, "kept", finish_reason="cancelled"))
            elif found is not None:
                replies.insert(0, _failure(found.id, "turn_cancelled", "cancelled"))
            return replies
        if isinstance(request, m.Turn | m.Generate):
            replies = list(self._answer(request))
            if not any(isinstance(r, m.Done | m.Failure) for r in replies):
                self._open[conn_id, request.id] = request
            return replies
        return [m.Result(request.id, control(request))]

    def _push(self, conn_id: bytes, reply: m.Reply) -> None:
        outbox = self._outboxes.get(conn_id)
        if outbox is None:
            with contextlib.suppress(ConnectionLost):
                self._server.send(conn_id, encode_reply(reply))
            return
        outbox.push(reply, time.monotonic())
        self._drain(conn_id)

    def _drain(self, conn_id: bytes) -> None:
        replies = self._outboxes[conn_id].take_ready()
        for i, reply in enumerate(replies):
            try:
                sent = self._server.send(conn_id, encode_reply(reply))
            except ConnectionLost:
                self._outboxes.pop(conn_id)
                return
            if not sent:
                self._outboxes[conn_id].put_back(replies[i:])
                return


def _failure(request_id: int, code: str, message: str) -> m.Failure:
    return m.Failure(request_id, code=code, message=message)
