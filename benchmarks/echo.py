"""What the machine itself takes for a request and its answer: the floor under a turn.

The same threads as a client's and a front's, with nothing to do but pass frames on::

    application thread --pipe--> socket thread --zmq--> another process
    application thread <--lock-- socket thread <--zmq--

Every arrow ends in a thread that slept, for about as long as in a real turn: one that has just gone
to sleep is woken in a fraction of the time, which would be a floor under nothing. The other process
is ``python -m benchmarks.echo ENDPOINT ANSWER_BYTES``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from benchmarks.report import ROOT
from sessionkv.ipc.waker import Waker

REST_US = 1000
"""About what a one-token turn takes."""
PATIENCE_S = 30.0
"""Whoever hears nothing for so long is alone: enough for the other process to start."""
_END = b""
_LINGER_MS = 1000
"""For the last word to one who may be gone."""


def _compute_us(duration_us: float) -> None:
    """Nothing useful, for so long."""
    end = time.perf_counter() + duration_us / 1e6
    while time.perf_counter() < end:
        pass


def wake_times_us(count: int) -> list[float]:
    """From one thread's write to the pipe that another sleeps on, until that other runs."""
    there, back = Waker(), Waker()
    woken: list[float] = []

    def sleeper() -> None:
        poller = zmq.Poller()
        poller.register(there.fd, zmq.POLLIN)
        for _ in range(count):
            poller.poll()
            woken.append(time.perf_counter())
            there.clear()
            back.wake()

    thread = threading.Thread(target=sleeper)
    thread.start()
    poller = zmq.Poller()
    poller.register(back.fd, zmq.POLLIN)
    asked = []
    for _ in range(count):
        _compute_us(REST_US)
        asked.append(time.perf_counter())
        there.wake()
        poller.poll()
        back.clear()
    thread.join()
    there.close()
    back.close()
    return [(b - a) * 1e6 for a, b in zip(asked, woken, strict=True)]


class _Asker:
    """A client's socket thread, as small as it can be."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._waiting: deque[bytes] = deque()
        self._waker = Waker()
        self._answered = threading.Lock()
        self._answered.acquire()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def ask(self, frame: bytes) -> None:
        """Send a frame and wait for its answer.

        Raises:
            TimeoutError: None comes.
        """
        self._waiting.append(frame)
        self._waker.wake()
        if not self._answered.acquire(timeout=PATIENCE_S):
            raise TimeoutError(f"the other process has not answered for {PATIENCE_S:g} s")

    def close(self) -> None:
        """End both sides."""
        self._waiting.append(_END)
        self._waker.wake()
        self._thread.join()
        self._waker.close()

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = _LINGER_MS
            dealer.connect(self._endpoint)
            poller = zmq.Poller()
            poller.register(self._waker.fd, zmq.POLLIN)
            poller.register(dealer, zmq.POLLIN)
            while True:
                ready = dict(poller.poll())
                if dealer in ready:
                    dealer.recv(zmq.NOBLOCK)
                    self._answered.release()
                if self._waker.fd in ready:
                    self._waker.clear()
                    while self._waiting:
                        frame = self._waiting.popleft()
                        dealer.send(frame)
                        if frame == _END:
                            return


@contextmanager
def _asker(answer_bytes: int) -> Iterator[_Asker]:
    with tempfile.TemporaryDirectory(prefix="skv-", dir="/tmp") as folder:
        endpoint = f"ipc://{folder}/echo"
        command = [sys.executable, "-m", "benchmarks.echo", endpoint, str(answer_bytes)]
        with subprocess.Popen(command, cwd=ROOT) as process:
            asker = _Asker(endpoint)
            try:
                yield asker
            finally:
                asker.close()
                process.kill()  # nothing of it is wanted any more, and it may have stood still


def echo_times_us(count: int, *, request_bytes: int, answer_bytes: int) -> list[float]:
    """From an application thread's asking to its having the answer of another process.

    That one computes for a while before it answers, which is not counted.

    Raises:
        TimeoutError: It has died, or stands still.
    """
    with _asker(answer_bytes) as asker:
        frame = bytes(request_bytes)
        for _ in range(50):
            asker.ask(frame)
        times = []
        for _ in range(count):
            start = time.perf_counter()
            asker.ask(frame)
            times.append((time.perf_counter() - start) * 1e6 - REST_US)
        return times


def _answer(endpoint: str, answer_bytes: int) -> None:
    """Until told to end, or nobody is there any more."""
    frame = bytes(answer_bytes)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(endpoint)
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        while True:
            if not poller.poll(PATIENCE_S * 1000):
                return
            connection, asked = router.recv_multipart(zmq.NOBLOCK)
            if asked == _END:
                return
            _compute_us(REST_US)
            router.send_multipart((connection, frame))


if __name__ == "__main__":
    _answer(sys.argv[1], int(sys.argv[2]))
