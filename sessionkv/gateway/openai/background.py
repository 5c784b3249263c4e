"""Responses that are made in the background: whoever waits for them, or nobody."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from sessionkv.errors import Overloaded, SessionKVError
from sessionkv.gateway.errors import problem_of
from sessionkv.gateway.openai.response_events import ResponseEvent
from sessionkv.gateway.openai.response_run import ResponseRun
from sessionkv.gateway.sse import named
from sessionkv.types.holdings import Holdings

_log = logging.getLogger(__name__)

MAX_RUNNING = 256
"""Responses that are being made, shared by tenants: what one holds is bounded by the window."""
MAX_OF_TENANT = 64
SETTLE_S = 5.0
"""How long the end of the gateway waits for responses whose turn has ended."""
MAX_KEPT_BYTES = 64 * 1024**2
"""Events of streams that have ended, for who resumes one; past that the oldest are forgotten of the
tenant that has most."""


class BackgroundResponse:
    """One response, from its first event to its last. One event loop.

    Attributes:
        body: Its object, as the last event told it that had it.
        num_bytes: Of the events that are kept.
        task: Makes it.
        is_followed: Its events are kept for who follows them, since it was asked for as a stream.
    """

    def __init__(
        self,
        run: ResponseRun,
        events: AsyncGenerator[ResponseEvent, None],
        first: ResponseEvent,
    ) -> None:
        """Go on from the first event.

        Args:
            run: What makes it.
            events: All further events; closed here.
            first: The first event.
        """
        self.body: dict[str, Any] = {}
        self.num_bytes = 0
        self.is_followed = run.is_streamed
        self._run: ResponseRun | None = run
        self._told: list[bytes] = []
        self._news = asyncio.Event()
        self._is_cancelled = False
        self._tell(first)
        self.task = asyncio.ensure_future(self._make(run, events))

    @property
    def is_over(self) -> bool:
        """No event comes any more."""
        return self.body["status"] not in ("queued", "in_progress")

    @property
    def is_settled(self) -> bool:
        """It has ended, and how is written down."""
        return self.task.done()

    async def follow(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Its events, framed, those to come as they come.

        Args:
            after: Number of the last event that is known.
        """
        place = after + 1
        while True:
            news = self._news  # before looking: what comes meanwhile is not missed
            while place < len(self._told):
                yield self._told[place]
                place += 1
            if self.is_over:
                return
            await news.wait()

    @property
    def _may_be_ended(self) -> bool:
        is_settling = self._run is None or self._run.is_settling
        return not (self.is_over or is_settling or self._is_cancelled)

    async def cancel(self) -> None:
        """End it, and wait for that. One that is about to be there already is let be there."""
        if self._may_be_ended:
            self._is_cancelled = True
            self.task.cancel()
        await asyncio.wait({self.task})

    async def leave(self) -> None:
        """The gateway ends: end it so that its note stays, which says that it was begun.

        One that is about to be there is let be there, for so long.
        """
        if self._may_be_ended:
            self.task.cancel()
        done, _ = await asyncio.wait({self.task}, timeout=SETTLE_S)
        if not done:  # what is left to be noted is found by whoever asks next
            self.task.cancel()
            await asyncio.wait({self.task})

    def input_items(self) -> list[dict[str, Any]]:
        """What came in with it, as long as it is not settled."""
        return [] if self._run is None else self._run.input_items()

    async def _make(self, run: ResponseRun, events: AsyncGenerator[ResponseEvent, None]) -> None:
        try:
            async with aclosing(events):
                async for event in events:
                    self._tell(event)
        except asyncio.CancelledError:
            if not self._is_cancelled:  # the gateway ends: the note says that it was begun
                raise
            self._tell(run.cancelled())
        except Exception as failure:  # noqa: BLE001 - nobody else hears of it
            self._tell(run.failure(problem_of(failure)))
        try:
            await run.settle(self.body)
        except SessionKVError as error:
            _log.warning("how a response ended could not be noted: %s", error.message)
        self._run = None  # with all that came in

    def _tell(self, event: ResponseEvent) -> None:
        self.body = event.get("response", self.body)
        if self.is_followed:
            framed = named(event["type"], event)
            self._told.append(framed)
            self.num_bytes += len(framed)
        news, self._news = self._news, asyncio.Event()
        news.set()


class Backgrounds:
    """Those of all callers, by tenant. One event loop."""

    def __init__(self) -> None:
        """None yet."""
        self._known: OrderedDict[tuple[str, str], BackgroundResponse] = OrderedDict()
        self._running = Holdings()

    async def start(self, tenant: str, run: ResponseRun) -> BackgroundResponse:
        """Begin one; what is wrong with its request is raised.

        Args:
            tenant: Whose it is.
            run: What makes it; not begun.

        Raises:
            Overloaded: As many as may be are being made, of the tenant or in all.
            SessionKVError: The request is at fault, or the engine.
        """
        self._require_room(tenant)
        self._running.add(tenant, 1)
        events, response = run.events(), None
        try:
            response = BackgroundResponse(run, events, await anext(events))
        finally:
            if response is None:
                self._running.add(tenant, -1)
                await events.aclose()
        self._known[tenant, run.id] = response
        response.task.add_done_callback(lambda _: self._ended(tenant, run.id))
        return response

    def find(self, tenant: str, response_id: str) -> BackgroundResponse | None:
        """One that is being made, or a stream whose events are still known."""
        return self._known.get((tenant, response_id))

    async def forget(self, tenant: str, response_id: str) -> None:
        """End one that is being made, and know nothing of it any more."""
        response = self._known.get((tenant, response_id))
        if response is not None:
            await response.cancel()
            self._known.pop((tenant, response_id), None)

    async def close(self) -> None:
        """The gateway ends. No other is begun from here on."""
        running = [known for known in self._known.values() if not known.is_settled]
        await asyncio.gather(*(response.leave() for response in running))

    def _require_room(self, tenant: str) -> None:
        running = self._running.of(tenant)
        if running >= MAX_OF_TENANT or not self._running.has_room(tenant, MAX_RUNNING):
            raise Overloaded(
                f"{running} responses of yours are being made in the background, as many as may",
                running=running,
            )

    def _ended(self, tenant: str, response_id: str) -> None:
        ended = self._known.get((tenant, response_id))
        if ended is not None and not ended.is_followed:
            del self._known[tenant, response_id]
        self._running.add(tenant, -1)
        over = [(key, known) for key, known in self._known.items() if known.is_over]
        held = Holdings()
        for (owner, _), known in over:
            held.add(owner, known.num_bytes)
        while held.total > MAX_KEPT_BYTES:
            largest = held.largest()
            oldest = next(item for item in over if item[0][0] == largest)
            over.remove(oldest)
            held.add(oldest[0][0], -oldest[1].num_bytes)
            del self._known[oldest[0]]
