"""The clients of a measurement: what they ask, and what they see of the answers in time.

Many streams are spread over several processes, each with an asyncio client of its own, so that
taking events in is not what is measured. All times are seconds of one clock, whichever process
took them. Knows neither models nor cases.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from sessionkv import AsyncClient, SamplingParams
from sessionkv.types import CacheReport

_START_S = 0.3
"""From asking the processes until all of them send at once."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        tokens: Ids of the prompt, or of what a session's turn adds.
        count: So many tokens are generated, whatever they are.
        session: Name of a session that exists; None is a generation without one.
        cache: Use and fill the prefix cache; without a session only.
        sampling: Other fields of ``SamplingParams``.
    """

    tokens: Sequence[int]
    count: int = 1
    session: str | None = None
    cache: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the client's methods."""
        fields = {"temperature": 0.6, **self.sampling, "max_tokens": self.count}
        options = {
            "tokens": self.tokens,
            "sampling": SamplingParams(**fields, ignore_eos=True),
        }
        return options if self.session is not None else options | {"cache": self.cache}


@dataclass(frozen=True, slots=True)
class Trace:
    """What a client saw of one answer.

    Attributes:
        sent_s: When it was asked for.
        events: When tokens came, and how many.
        tokens: All of them.
        chars: Length of their text.
        logprobs: Of each token, as asked for.
        cache: The engine's own report.
    """

    sent_s: float
    events: tuple[tuple[float, int], ...]
    tokens: tuple[int, ...]
    chars: int
    cache: CacheReport
    logprobs: Any = field(default=None, repr=False)

    @property
    def first_s(self) -> float:
        """When the first token came."""
        return self.events[0][0]

    @property
    def last_s(self) -> float:
        """When the last one came."""
        return self.events[-1][0]

    @property
    def ttft_ms(self) -> float:
        """From asking to the first token, as the client sees it."""
        return 1000.0 * (self.first_s - self.sent_s)


class _Taker:
    """Takes the events of one stream."""

    def __init__(self) -> None:
        self._sent_s = time.perf_counter()
        self._events: list[tuple[float, int]] = []
        self._chars = 0
        self._result: Any = None

    def take(self, event: Any) -> None:
        if event.tokens:
            self._events.append((time.perf_counter(), len(event.tokens)))
        self._chars += len(event.text)
        self._result = event.result

    def trace(self, ask: Ask) -> Trace:
        result = self._result
        if len(result.tokens) != ask.count:
            raise RuntimeError(f"{len(result.tokens)} tokens came instead of {ask.count}")
        return Trace(
            self._sent_s,
            tuple(self._events),
            tuple(result.tokens),
            self._chars,
            result.cache,
            result.logprobs,
        )


def one(client: Any, ask: Ask) -> Trace:
    """Ask through a blocking client."""
    options, taker = ask.options, _Taker()
    if ask.session is None:
        stream = client.stream_generate(**options)
    else:
        stream = client.session(ask.session).stream(**options)
    for event in stream:
        taker.take(event)
    return taker.trace(ask)


async def one_async(client: AsyncClient, ask: Ask, first: asyncio.Event | None = None) -> Trace:
    """As :func:`one`, in an event loop; ``first`` is set when the first token comes."""
    options, taker = ask.options, _Taker()
    if ask.session is None:
        stream = client.stream_generate(**options)
    else:
        stream = client.session(ask.session).stream(**options)
    async for event in stream:
        taker.take(event)
        if first is not None:
            first.set()
    return taker.trace(ask)


async def together_async(client: AsyncClient, asks: Sequence[Ask]) -> list[Trace]:
    """Ask for all at once; answers in their order."""
    return list(await asyncio.gather(*(one_async(client, ask) for ask in asks)))


def together(endpoint: str, asks: Sequence[Ask], start_s: float = 0.0) -> list[Trace]:
    """Ask for all at once, from this process, not before ``start_s``."""

    async def run() -> list[Trace]:
        async with AsyncClient(endpoint) as client:
            await asyncio.sleep(max(0.0, start_s - time.perf_counter()))
            return await together_async(client, asks)

    return asyncio.run(run())


def _stay(seconds: float) -> None:
    """A task whose process has loaded all this, and takes no other for a while."""
    time.sleep(seconds)


class Drivers:
    """Processes that ask; a context manager.

    Args:
        count: How many; 1 is this process itself.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Drivers:
        if self._count > 1:
            from multiprocessing import get_context

            # Forking would copy the threads' locks, but not the threads, of the clients here.
            self._pool = ProcessPoolExecutor(self._count, mp_context=get_context("spawn"))
            for ready in [self._pool.submit(_stay, 1.0) for _ in range(self._count)]:
                ready.result()  # all of them are there, so none starts up in a measurement
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def together(self, endpoint: str, asks: Sequence[Ask]) -> list[Trace]:
        """Ask for all at once; answers in their order."""
        if self._pool is None:
            return together(endpoint, asks)
        start_s = time.perf_counter() + _START_S
        parts = [list(asks[i :: self._count]) for i in range(self._count)]
        jobs = [self._pool.submit(together, endpoint, part, start_s) for part in parts if part]
        found: dict[int, Trace] = {}
        for i, job in enumerate(jobs):
            found |= {i + self._count * n: trace for n, trace in enumerate(job.result())}
        return [found[i] for i in range(len(asks))]


def decode_rate(traces: Sequence[Trace]) -> float:
    """Tokens a second while all streams decode: after the last first token, to the first end."""
    start, end = max(t.first_s for t in traces), min(t.last_s for t in traces)
    if end <= start:
        raise RuntimeError("the streams never decoded all together")
    taken = sum(n for trace in traces for at, n in trace.events if start < at <= end)
    return taken / (end - start)


def gaps_ms(trace: Trace, start_s: float, end_s: float) -> list[float]:
    """Times between events that end within a window."""
    times = [at for at, _ in trace.events]
    return [
        1000.0 * (after - before)
        for before, after in itertools.pairwise(times)
        if start_s <= after <= end_s
    ]
