"""The three doors to an engine, behind one blocking face: embedded, ``Client``, ``AsyncClient``.

A test written against :class:`Door` runs the same against all of them; what it may use is what
``Client``, ``Session`` and ``Stream`` have in common with their asyncio twins.
"""

import asyncio
import inspect
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from sessionkv import AsyncClient, Client, EngineConfig
from sessionkv.client.async_client import AsyncSession
from sessionkv.client.async_stream import AsyncStream
from sessionkv.store.gates import OPEN_GATES, Gates
from sessionkv.text.builtin import IM_END
from sessionkv.types import StepPlan
from tests.builders.engine import CheckedEngine, SocketEngine, open_engine, socket_engine

KINDS = ("engine", "client", "async")


class EventLoop:
    """An asyncio loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="loop")
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Blocking:
    """An asyncio client, session or stream with the blocking methods of its twin."""

    def __init__(self, target: Any, loop: EventLoop) -> None:
        self._target = target
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        if name == "close" and isinstance(self._target, AsyncStream):
            name = "aclose"
        value = getattr(self._target, name)
        if not callable(value):
            return value
        return lambda *args, **fields: self._wrapped(value(*args, **fields))

    def _wrapped(self, value: Any) -> Any:
        if inspect.iscoroutine(value):
            value = self._loop.run(value)
        return (
            Blocking(value, self._loop) if isinstance(value, AsyncSession | AsyncStream) else value
        )

    def __iter__(self) -> "Blocking":
        return self

    def __next__(self) -> Any:
        try:
            return self._loop.run(self._target.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> "Blocking":
        self._loop.run(self._target.__aenter__())
        return self

    def __exit__(self, *exc: Any) -> None:
        self._loop.run(self._target.__aexit__(*exc))


class Later:
    """Something blocking that runs on a thread; its result or error is there in the end."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="later")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:  # noqa: BLE001 - raised again by whoever asks
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive(), "it never came back"
        if self._error is not None:
            raise self._error
        return self._value

    def error(self) -> BaseException:
        self._thread.join(60)
        assert self._error is not None, f"it gave {self._value!r}"
        return self._error


class Door:
    """One engine and a client of it.

    Attributes:
        kind: Of :data:`KINDS`.
        client: With the methods of :class:`~sessionkv.client.client.Client`.
        engine: What holds ``parts`` and ``building``.
    """

    def __init__(self, kind: str, client: Any, engine: CheckedEngine | SocketEngine) -> None:
        self.kind = kind
        self.client = client
        self.engine = engine

    @property
    def parts(self) -> Any:
        return self.engine.parts

    def log(self, name: str) -> list[int]:
        """The ids of a session's log; while nothing of it changes."""
        tree = self.parts.tree
        return list(tree.tokens_of(tree.head("local", name).node_id))

    def wait_queued(self, name: str, count: int) -> None:
        """Until so many turns wait behind the running one; each look is a round through core."""
        for _ in range(100_000):
            info = self.client.session(name).info()
            if info.running and info.queued == count:
                return
        raise AssertionError(f"there were never {count} turns in line")

    def assert_ledger(self) -> None:
        """Idle: the books balance, nothing is leased or under way."""
        self.client.flush()
        for _ in range(10_000):
            if not self.client.stats()["ledger"]["transfers_in_flight"]:
                break
        self.parts.kv.check()
        ledger = self.parts.kv.ledger()
        assert ledger.idle, ledger
        assert self.client.stats()["book_errors"] == 0


@contextmanager
def open_door(
    kind: str,
    config: EngineConfig | None = None,
    *,
    gates: Gates = OPEN_GATES,
    gate: Callable[[StepPlan], None] | None = None,
    runner: dict[str, Any] | None = None,
) -> Iterator[Door]:
    """An engine and a client of the kind; arguments as for ``open_engine``."""
    parts = {"gates": gates, "gate": gate, "runner": runner}
    with ExitStack() as stack:
        if kind == "engine":
            engine = stack.enter_context(open_engine(config, **parts))
            yield Door(kind, engine, engine)
            return
        folder = Path(tempfile.mkdtemp(prefix="skv-", dir="/tmp"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        served = stack.enter_context(socket_engine(folder, config, **parts))
        if kind == "client":
            yield Door(kind, stack.enter_context(Client(served.endpoint)), served)
            return
        loop = EventLoop()
        stack.callback(loop.close)
        client = Blocking(AsyncClient(served.endpoint), loop)
        stack.enter_context(client)
        yield Door(kind, client, served)


class Hold:
    """Lets turns go on and on until the test releases them, while the engine goes on with the rest.

    Give ``hold.gate`` and ``hold.script`` to the runner. Until then every token sampled is 0, a few
    hundred a second; the first one after is the end token for turns that were held.
    """

    def __init__(self) -> None:
        self._released = threading.Event()
        self._going = threading.Event()
        # By identity: a sequence's list is one for all its life, and is kept here for that.
        self._held: dict[int, Sequence[int]] = {}

    def gate(self, plan: StepPlan) -> None:
        self._released.wait(0.002)

    def script(self, token_ids: Sequence[int]) -> int | None:
        if self._released.is_set():
            return IM_END if id(token_ids) in self._held else None
        if list(token_ids[-2:]) == [0, 0]:
            self._held[id(token_ids)] = token_ids
            self._going.set()
        return 0

    def wait_going(self) -> None:
        assert self._going.wait(30), "no turn is held"

    def release(self) -> None:
        self._released.set()


class Script:
    """Has each new sequence sample the next of the given replies, id by id, then the hash."""

    def __init__(self, *replies: Sequence[int]) -> None:
        self._replies = list(replies)
        self._running: dict[int, tuple[Sequence[int], int, Sequence[int]]] = {}

    def add(self, *replies: Sequence[int]) -> None:
        self._replies += replies

    def __call__(self, token_ids: Sequence[int]) -> int | None:
        # A sequence's list is one for all its life; it is kept here so that its id is its own.
        if id(token_ids) not in self._running:
            reply = self._replies.pop(0) if self._replies else ()
            self._running[id(token_ids)] = (token_ids, len(token_ids), reply)
        _, start, reply = self._running[id(token_ids)]
        at = len(token_ids) - start
        return reply[at] if at < len(reply) else None
