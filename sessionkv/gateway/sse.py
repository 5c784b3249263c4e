"""Answers that may take long: streams of server-sent events, and whole ones that a client awaits.

Whichever it is, a client that goes away ends the work for it at once: the turn behind it is
cancelled. A stream answers with a true status as long as nothing was sent; an error after that is
one more event, and the stream ends without the API's own end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import asdict
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sessionkv.client import PromptProgress
from sessionkv.gateway.errors import Problem, problem_of

T = TypeVar("T")
PING = b": ping\n\n"
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
}
"""For the document of a route that answers at once or as a stream."""
STALL_S = 10.0
"""How long a client may read nothing: well below the time after which the engine would end all
streams of the connection that this one shares, as their unread events count together."""
_AT_ONCE = 4
"""Events written before the loop has a turn, in which it notices that a client is gone: asyncio
logs a line for each further write to such a one, from the fifth on."""


def data(value: Any) -> bytes:
    """One event as OpenAI's APIs write it."""
    return b"data: " + _dumps(value) + b"\n\n"


def named(name: str, value: Any) -> bytes:
    """One event with a name, as Anthropic's API and Responses write it."""
    return b"event: " + name.encode() + b"\ndata: " + _dumps(value) + b"\n\n"


def progress(done: PromptProgress) -> bytes:
    """How far a prompt is, as a comment: clients that do not look for it never see it."""
    return b": progress " + _dumps(asdict(done)) + b"\n\n"


def _dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def openai_error(problem: Problem) -> bytes:
    """The last event of a stream that failed, in the shape of OpenAI's APIs."""
    return data(problem.openai())


class ClientGone(Exception):
    """The client went away; nobody reads an answer."""


class EventStream(Response):
    """A stream of events. The events' generator is closed whatever ends the stream."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        ping_s: float,
        error: Callable[[Problem], bytes] = openai_error,
        ping: bytes = PING,
        stall_s: float = STALL_S,
    ) -> None:
        """Prepare; nothing is asked of ``events`` before the response is sent.

        Args:
            events: Whole events, framed. What it raises before the first one is answered with a
                status and a body; after it, with one event.
            ping_s: After so long without an event one ping is sent, the first of which begins the
                stream with status 200.
            error: Makes the last event of a stream that failed.
            ping: What to send when there is nothing to say.
            stall_s: A client that takes nothing for so long is taken for gone.
        """
        super().__init__(None)
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        self._events = events
        self._ping_s = ping_s
        self._error = error
        self._ping = ping
        self._stall_s = stall_s
        self._begun = False
        self._at_once = 0
        self._spoke = False
        self._over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all, or stop when the client is gone."""
        writer = asyncio.ensure_future(self._write(scope, receive, send))
        pinger = asyncio.ensure_future(self._pings(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((writer, gone), return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            await _end(writer, pinger, gone)

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for event in self._events:
                await self._say(send, event)
        except ClientGone:
            return  # the connection is closed behind an answer that did not end
        except Exception as failure:  # noqa: BLE001 - the one place where a stream's failure is told
            problem = problem_of(failure)
            if not self._begun:
                self._over = True
                await problem.response(scope["path"])(scope, receive, send)
                return
            await self._say(send, self._error(problem))
        finally:
            await self._events.aclose()
        if not self._begun:
            await self._say(send, b"")
        self._over = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pings(self, send: Send) -> None:
        """Whole events only are sent, so a ping never falls into one."""
        while True:
            self._spoke = False
            await asyncio.sleep(self._ping_s)
            if not (self._spoke or self._over):
                await self._say(send, self._ping)

    async def _say(self, send: Send, event: bytes) -> None:
        self._spoke = True
        if not self._begun:
            self._begun = True
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
        try:
            async with asyncio.timeout(self._stall_s):
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except TimeoutError:
            raise ClientGone from None
        self._at_once += 1
        if self._at_once == _AT_ONCE:
            self._at_once = 0
            await asyncio.sleep(0)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await a whole answer; cancelled at once when the client goes away.

    Raises:
        ClientGone: It did.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await _end(working, gone)


async def _gone(receive: Receive) -> None:
    """Until the client is gone; what it still sends is read and dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait for its end; of one that is cut short nobody hears why."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()
