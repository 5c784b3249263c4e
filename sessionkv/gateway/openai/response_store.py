"""Where responses are: each the last turn of a session of its own, named by the response's id.

The sessions are branches of one tree, so what two responses have in common is there once; each
lives as long as its name, 30 days at most, whatever becomes of the others. Nothing is remembered
here: what is asked for is read from the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sessionkv.client import AsyncClient, StreamEvent, TurnResult
from sessionkv.client.async_client import AsyncSession
from sessionkv.client.async_stream import AsyncStream
from sessionkv.client.options import GenerateOptions, TurnOptions
from sessionkv.client.results import NodeInfo
from sessionkv.errors import SessionKVError, SessionNotFound, TurnFailed
from sessionkv.gateway.openai.response_body import Kept, body_of, status_of, usage_of
from sessionkv.gateway.openai.response_errors import ResponseNotFound
from sessionkv.gateway.openai.response_events import output_of
from sessionkv.gateway.openai.response_ids import call_ids, is_response_id, item_ids, session_of
from sessionkv.gateway.openai.response_items import from_messages, to_messages
from sessionkv.gateway.replies import ReplyEvent, ReplyParser, ReplyStyle
from sessionkv.types import FinishReason

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """A response as it is kept."""

    node: NodeInfo
    kept: Kept

    @property
    def id(self) -> str:
        """Its id."""
        return str(self.kept.echo["id"])


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a response goes on from: an earlier response, or what a conversation has come to.

    Attributes:
        session: What holds the last response, None where there is none.
        last: That response; None also where it cannot be gone on from, since something up to it
            was deleted.
        extra: Items that were added since.
        items: All items, where there is no ``last``.
    """

    session: str | None
    last: Found | None
    extra: Sequence[Mapping[str, Any]]
    items: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Plan:
    """A turn that is to become a response.

    Attributes:
        name: The session that is to hold it; it is made for it.
        base: The session whose last turn it follows; None where it begins anew.
        system: System prompt of a beginning.
        tools: Tools of the whole conversation.
        messages: What the turn adds; of a beginning all messages.
        kept: What is kept with it.
        is_stored: Whether it is there afterwards.
    """

    name: str
    base: str | None
    system: str | None
    tools: Sequence[Mapping[str, Any]]
    messages: Sequence[Message]
    kept: Kept
    is_stored: bool


class ResponseStore:
    """Responses of one caller. One event loop.

    Attributes:
        style: How the model writes replies.
    """

    def __init__(
        self, client: AsyncClient, style: ReplyStyle, tasks: set[asyncio.Task[None]]
    ) -> None:
        """Over a caller's connection.

        Args:
            client: The connection.
            style: How the model writes replies.
            tasks: Where work is kept that nobody waits for.
        """
        self._client = client
        self.style = style
        self._tasks = tasks

    # Reading ---------------------------------------------------------------------------------

    async def find(self, response_id: str) -> Found:
        """A response by its id.

        Raises:
            ResponseNotFound: There is none.
        """
        if is_response_id(response_id):
            with contextlib.suppress(SessionNotFound):
                node = await self._client.session(session_of(response_id)).node()
                kept = Kept.of(node)
                # A session whose own turn has not ended stands on the response before it.
                if kept is not None and kept.echo["id"] == response_id:
                    return Found(node, kept)
        raise ResponseNotFound.of(response_id)

    def body(self, found: Found) -> dict[str, Any]:
        """The whole response, as it was answered."""
        node, output = found.node, self.output(found)
        body = body_of(
            found.kept,
            node.tools,
            status=status_of(node.finish_reason),
            output=output,
            usage=usage_of(node.usage, output),
        )
        return body | {"sessionkv": {"node": node.node}}

    def output(self, found: Found) -> list[dict[str, Any]]:
        """The items that a response gave out."""
        return self._output(found.node, found.kept, found.id)

    def input_items(self, found: Found) -> list[dict[str, Any]]:
        """The items that came in with a response, those of the conversation before it left out."""
        kept, node = found.kept, found.node
        system = [{"role": part.role, "content": part.text} for part in kept.own_system]
        own = node.messages[kept.num_history :]
        return from_messages([*system, *own], item_ids(found.id, "i"))

    async def path(self, session: str) -> list[NodeInfo]:
        """Turns of a session, the oldest first. One question a turn."""
        handle = self._client.session(session)
        node = await handle.node()
        found = []
        while node.parent is not None:
            found.append(node)
            node = await handle.node(node.parent)
        return found[::-1]

    async def history(self, session: str) -> list[Message]:
        """A session's conversation as messages, for a template to write anew."""
        messages: list[Message] = []
        for node in await self.path(session):
            kept = Kept.of(node)
            owner = node.node if kept is None else str(kept.echo["id"])
            messages += node.messages
            messages += to_messages(self._output(node, kept, owner))
        return messages

    def _output(self, node: NodeInfo, kept: Kept | None, owner: str) -> list[dict[str, Any]]:
        calls = bool(node.tools) and (kept is None or kept.calls_tools)
        text = "" if node.reply is None else node.reply["content"] or ""
        parser = self.parser(owner, calls=calls)
        pieces: list[ReplyEvent] = [*parser.feed(text), *parser.end()]
        is_cut = node.finish_reason is FinishReason.LENGTH
        calls_once = kept is not None and kept.calls_once
        return output_of(owner, pieces, is_cut=is_cut, calls_once=calls_once)

    @property
    def reads_calls(self) -> bool:
        """Whether the model writes calls that can be told from text."""
        return self.style.tool_calls is not None

    def parser(self, owner: str, *, calls: bool) -> ReplyParser:
        """Takes a response's reply apart.

        Args:
            owner: Its id, from which those of its calls are made.
            calls: Whether what looks like a call is one.
        """
        style = self.style if calls else self.style.without_calls()
        return ReplyParser(style, new_id=call_ids(owner))

    # Writing ---------------------------------------------------------------------------------

    async def run(
        self, plan: Plan, options: TurnOptions, *, stream: bool, is_over: Callable[[], bool]
    ) -> AsyncGenerator[StreamEvent, None]:
        """Run a planned turn; the last event has the result, and then the response is there.

        Args:
            plan: What is to be run.
            options: Sampling and priority.
            stream: Say what was generated as it is; otherwise there is one event.
            is_over: Asked after each event of a stream; where it is, the turn ends there.
        """
        if plan.base is None and not plan.is_stored:
            generation = _generation(self._client, plan, options, stream=stream)
            async for event in _events(generation, is_over):
                yield event
            return
        making = asyncio.ensure_future(self._make(plan))
        # The request for the session goes out now, the turn's right behind it: the engine takes
        # them in order, so nothing is waited for in between.
        await asyncio.sleep(0)
        session = self._client.session(plan.name)
        is_there = False
        events = _events(_turn(session, plan, options, stream=stream), is_over)
        try:
            async for event in events:
                if event.result is not None:
                    await making
                    is_there = plan.is_stored
                yield event
        except SessionKVError:
            await making  # where that failed, the turn failed for it
            raise
        finally:
            await events.aclose()
            if not is_there:
                self._later(self._drop(plan.name, making))

    async def delete(self, found: Found) -> None:
        """Forget a response; those that went on from it stay as they are."""
        await self._client.delete(session_of(found.id))

    def pin(self, response_id: str, tier: str, ttl_s: float) -> None:
        """Let a response's KV leave a tier last for a time, where there is room to promise it."""
        session = self._client.session(session_of(response_id))
        self._later(session.pin(tier=tier, ttl_s=ttl_s))

    async def _make(self, plan: Plan) -> None:
        if plan.base is None:
            await self._client.open(plan.name, system=plan.system, tools=plan.tools or None)
        else:
            await self._client.session(plan.base).fork(plan.name)

    async def _drop(self, name: str, making: asyncio.Future[None]) -> None:
        with contextlib.suppress(SessionKVError):
            await making
        await self._client.delete(name)

    def _later(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.ensure_future(_quietly(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _turn(
    session: AsyncSession, plan: Plan, options: TurnOptions, *, stream: bool
) -> AsyncStream | Awaitable[TurnResult]:
    options = {**options, "metadata": plan.kept.to_metadata()}
    if stream:
        return session.stream(messages=plan.messages, **options)
    return session.turn(messages=plan.messages, **options)


def _generation(
    client: AsyncClient, plan: Plan, options: TurnOptions, *, stream: bool
) -> AsyncStream | Awaitable[TurnResult]:
    """A plan that leaves nothing and follows nothing: no session is made for it."""
    system = [] if plan.system is None else [{"role": "system", "content": plan.system}]
    messages = [*system, *plan.messages]
    common: GenerateOptions = {
        "tools": plan.tools or None,
        "sampling": options.get("sampling"),
        "priority": options.get("priority", 0),
        "progress": options.get("progress", False),
    }
    if stream:
        return client.stream_generate(messages=messages, **common)
    return client.generate(messages=messages, **common)


async def _events(
    running: AsyncStream | Awaitable[TurnResult], is_over: Callable[[], bool]
) -> AsyncGenerator[StreamEvent, None]:
    if not isinstance(running, AsyncStream):
        result = await running
        yield StreamEvent(text=result.text, tokens=result.tokens, result=result)
        return
    try:
        async for event in running:
            yield event
            if event.result is None and is_over():
                kept = await running.cancel(keep=True)
                if kept is None:
                    raise TurnFailed("the turn could not be ended with its first call")
                yield StreamEvent(result=kept)
                return
    finally:
        await running.aclose()


async def _quietly(work: Coroutine[Any, Any, object]) -> None:
    """Nobody hears of what nobody waits for; what it leaves runs out by itself."""
    with contextlib.suppress(SessionKVError):
        await work
