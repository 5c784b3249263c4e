"""A transport without an engine: what was sent is in ``sent``; the test delivers the replies.

``answering`` makes it answer by itself, from within a thread of its own as a real transport does.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from sessionkv.config import LimitsConfig
from sessionkv.errors import EngineClosed
from sessionkv.ipc.messages import Reply, Request
from sessionkv.ipc.transport import ReplySink
from sessionkv.ipc.validate import check_request


class FakeTransport:
    """Passes message objects, checked and copied."""

    def __init__(self) -> None:
        self.sent: list[Request] = []
        self.closed = False
        self.sink: ReplySink

    def start(self, sink: ReplySink) -> None:
        self.sink = sink

    def send(self, request: Request) -> None:
        if self.closed:
            raise EngineClosed("closed")
        self.sent.append(check_request(request, LimitsConfig()))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.sink.lost(EngineClosed("closed"), final=True)


class AnsweringTransport(FakeTransport):
    """Answers each request with ``answer(request)``, from its own thread."""

    def __init__(self, answer: Callable[[Request], Sequence[Reply]]) -> None:
        super().__init__()
        self._answer = answer
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="answering")

    def start(self, sink: ReplySink) -> None:
        super().start(sink)
        self._thread.start()

    def send(self, request: Request) -> None:
        super().send(request)
        self._queue.put(self.sent[-1])

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        super().close()

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            for reply in self._answer(request):
                self.sink.deliver(reply)
