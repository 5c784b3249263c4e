"""Where responses are: each the last turn of a session of its own, named by the response's id.

The sessions are branches of one tree, so what two responses have in common is there once; each
lives as long as its name, 30 days at most, whatever becomes of the others. Nothing is remembered
here: what is asked for is read from the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from sessionkv.client import AsyncClient, StreamEvent, TurnResult
from sessionkv.client.options import TurnOptions
from sessionkv.client.results import Logprobs, NodeInfo
from sessionkv.errors import (
    PreviousResponseNotFound,
    ResponseNotFound,
    SessionKVError,
    SessionNotFound,
    TurnFailed,
)
from sessionkv.gateway.early_end import until
from sessionkv.gateway.openai.background_notes import BackgroundNotes, NotedResponse
from sessionkv.gateway.openai.response_body import KeptResponse, body_of, status_of, usage_of
from sessionkv.gateway.openai.response_events import output_of
from sessionkv.gateway.openai.response_ids import (
    PASSING,
    call_ids,
    is_response_id,
    item_ids,
    passing_session_of,
    session_of,
)
from sessionkv.gateway.openai.response_items import from_messages, namespaces_of, to_messages
from sessionkv.gateway.openai.response_passing import PassingResponses
from sessionkv.gateway.openai.response_turn import Plan, turn_of
from sessionkv.gateway.pieces import Pieces
from sessionkv.gateway.replies import ReplyEvent, ReplyParser, ReplyStyle
from sessionkv.types import FinishReason

_log = logging.getLogger(__name__)

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """A response as it is kept."""

    node: NodeInfo
    kept: KeptResponse

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


class ResponseStore:
    """Responses of one caller. One event loop.

    Attributes:
        style: How the model writes replies.
        notes: Of responses that are made in the background.
        passing: Runs and counts what is not stored and begins anew.
    """

    def __init__(
        self,
        client: AsyncClient,
        style: ReplyStyle,
        later: Callable[[Coroutine[Any, Any, None]], object],
        *,
        pieces: Pieces,
        run: str,
        passing: PassingResponses,
    ) -> None:
        """Over a caller's connection.

        Args:
            client: The connection.
            style: How the model writes replies.
            later: Has something done that nobody waits for.
            pieces: What tokens stand for.
            run: Names this run of the gateway.
            passing: The request's own, for what is not stored.
        """
        self._client = client
        self._pieces = pieces
        self.notes = BackgroundNotes(client)
        self.style = style
        self._later = later
        self._run = run
        self.passing = passing

    # Reading ---------------------------------------------------------------------------------

    async def find(self, response_id: str) -> Found:
        """A response by its id.

        Raises:
            ResponseNotFound: There is none.
        """
        if is_response_id(response_id):
            with contextlib.suppress(SessionNotFound):
                node = await self._client.session(session_of(response_id)).node()
                kept = KeptResponse.of(node)
                # A session whose own turn has not ended stands on the response before it.
                if kept is not None and kept.echo["id"] == response_id:
                    return Found(node, kept)
        raise ResponseNotFound(response_id)

    async def found(self, response_id: str) -> Found | NotedResponse:
        """A response that is not being made here now, be it there or not.

        Raises:
            ResponseNotFound: Nothing is known of it.
        """
        try:
            return await self.find(response_id)
        except ResponseNotFound:
            noted = await self.notes.find(response_id)
        if noted.was_left:  # unless it came to be there since it was looked for
            with contextlib.suppress(ResponseNotFound):
                return await self.find(response_id)
        return noted

    async def previous(self, response_id: str) -> Found:
        """What a request goes on from.

        Raises:
            PreviousResponseNotFound: There is none.
        """
        try:
            return await self.find(response_id)
        except ResponseNotFound:
            raise PreviousResponseNotFound(response_id) from None

    def body(self, found: Found | NotedResponse) -> dict[str, Any]:
        """The whole response, as it was answered."""
        if isinstance(found, NotedResponse):
            return found.body()
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

    def input_items(self, found: Found | NotedResponse) -> list[dict[str, Any]]:
        """The items that came in with a response, those of the conversation before it left out."""
        return self.items_of(found.kept, found.node.messages)

    def items_of(self, kept: KeptResponse, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Items that came in with a response, out of its turn's messages."""
        system = [{"role": part.role, "content": part.text} for part in kept.own_system]
        own = messages[kept.num_history :]
        return from_messages([*system, *own], item_ids(str(kept.echo["id"]), "i"))

    async def nodes(self, session: str) -> list[NodeInfo]:
        """Turns of a session, the oldest first. One question."""
        return (await self._client.session(session).nodes())[1:]

    async def history(self, session: str) -> list[Message]:
        """A session's conversation as messages, for a template to write anew. One question."""
        messages: list[Message] = []
        for node in await self.nodes(session):
            kept = KeptResponse.of(node)
            owner = node.node if kept is None else str(kept.echo["id"])
            messages += node.messages
            messages += to_messages(self._output(node, kept, owner))
        return messages

    def _output(
        self, node: NodeInfo, kept: KeptResponse | None, owner: str
    ) -> list[dict[str, Any]]:
        calls = bool(node.tools) and (kept is None or kept.calls_tools)
        text = "" if node.reply is None else node.reply["content"] or ""
        parser = self.parser(owner, calls=calls, tools=node.tools)
        pieces: list[ReplyEvent] = [*parser.feed(text), *parser.end()]
        is_cut = node.finish_reason is FinishReason.LENGTH
        if kept is None:
            return output_of(owner, pieces, is_cut=is_cut)
        namespaces = namespaces_of(kept.spaces, node.tools)
        return output_of(
            owner, pieces, is_cut=is_cut, calls_once=kept.calls_once, namespaces=namespaces
        )

    def parser(
        self, owner: str, *, calls: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> ReplyParser:
        """Takes a response's reply apart.

        Args:
            owner: Its id, from which those of its calls are made.
            calls: Whether what looks like a call is one.
            tools: As the template is given them.
        """
        return ReplyParser(self.style_of(calls=calls), new_id=call_ids(owner), tools=tools)

    def style_of(self, *, calls: bool) -> ReplyStyle:
        """How the model writes a reply.

        Args:
            calls: Whether what looks like a call is one.
        """
        return self.style if calls else self.style.without_calls()

    async def spelled(self, entries: Logprobs) -> Mapping[int, bytes]:
        """Bytes of all ids in some log-probabilities.

        Raises:
            SessionKVError: The engine cannot say.
        """
        return await self._pieces.of_logprobs(self._client, entries)

    # Writing ---------------------------------------------------------------------------------

    def name(self, response_id: str, *, is_stored: bool) -> str:
        """The session in which a response is to be made."""
        return session_of(response_id) if is_stored else passing_session_of(response_id, self._run)

    async def run(
        self, plan: Plan, options: TurnOptions, ends_at: Callable[[], int | None]
    ) -> AsyncGenerator[StreamEvent, None]:
        """Run a planned turn; by its last event the response is there, or nothing of it is.

        Args:
            plan: What is to be run.
            options: Sampling and priority.
            ends_at: Asked after each event: after how many characters the reply ends, if it does.

        Raises:
            PreviousResponseNotFound: What it goes on from was deleted meanwhile.
            SessionKVError: The turn failed, or could not be forgotten.
        """
        if plan.is_passing:
            reply_of = partial(self._reply, plan)
            async with aclosing(self.passing.run(plan, options, ends_at, reply_of)) as events:
                async for event in events:
                    yield event
            return
        making = asyncio.ensure_future(self._make(plan))
        # The request for the session goes out now, the turn's right behind it: the engine takes
        # them in order, so nothing is waited for in between.
        await asyncio.sleep(0)
        session, is_settled = self._client.session(plan.name), False
        events = until(turn_of(session, plan, options), ends_at)
        try:
            async for event in events:
                if event.result is not None:
                    await making
                    if not plan.is_stored:
                        await self._client.delete(plan.name)
                    is_settled = True
                yield event
        except SessionKVError:
            await making  # where that failed, the turn failed for it
            raise
        finally:
            await events.aclose()
            if not is_settled:
                self.later(self._drop(plan.name, making))

    async def whole(self, plan: Plan, options: TurnOptions) -> TurnResult:
        """As :meth:`run`, for its result alone: nobody goes on from it."""
        result: TurnResult | None = None
        if plan.is_passing:
            running = self.passing.run(plan, options, _never, None)
        else:
            running = self.run(plan, options, _never)
        async with aclosing(running) as events:
            async for event in events:
                result = event.result
        if result is None:
            raise TurnFailed("the turn ended without a result")
        return result

    def _reply(self, plan: Plan, result: TurnResult) -> Message | None:
        """An answer as a client sends it back, where its items are one message."""
        kept, owner = plan.kept, str(plan.kept.echo["id"])
        calls = bool(plan.tools) and kept.calls_tools
        parser = self.parser(owner, calls=calls, tools=plan.tools)
        pieces = [*parser.feed(result.text), *parser.end()]
        is_cut = result.finish_reason is FinishReason.LENGTH
        items = output_of(owner, pieces, is_cut=is_cut, calls_once=kept.calls_once)
        messages = to_messages(items)
        return messages[0] if len(messages) == 1 else None

    async def delete(self, response_id: str) -> None:
        """Forget a response and what was noted of it; those that went on from it stay."""
        with contextlib.suppress(SessionNotFound):
            await self._client.delete(session_of(response_id))
        await self.notes.delete(response_id)

    async def forget(self, plan: Plan) -> None:
        """Forget what was made of a plan, where there is anything of it."""
        with contextlib.suppress(SessionNotFound):
            await self._client.delete(plan.name)

    def pin(self, response_id: str, tier: str, ttl_s: float) -> None:
        """Let a response's KV leave a tier last for a time, where there is room to promise it."""
        session = self._client.session(session_of(response_id))
        self.later(session.pin(tier=tier, ttl_s=ttl_s))

    def later(self, work: Coroutine[Any, Any, object]) -> None:
        """Have something done that nobody waits for; where it fails the log says so."""
        self._later(_told(work))

    def sweep(self) -> None:
        """Have deleted what an earlier run of the gateway left of responses that are not stored."""
        self.later(self._sweep())

    async def _sweep(self) -> None:
        for info in await self._client.sessions(PASSING):
            if not info.name.startswith(f"{PASSING}{self._run}:"):
                with contextlib.suppress(SessionNotFound):
                    await self._client.delete(info.name)

    async def _make(self, plan: Plan) -> None:
        if plan.base is None:
            await self._client.open(plan.name, system=plan.system, tools=plan.tools or None)
            return
        try:
            await self._client.session(plan.base).fork(plan.name)
        except SessionNotFound:
            raise PreviousResponseNotFound(plan.base.rpartition(":")[2]) from None

    async def _drop(self, name: str, making: asyncio.Future[None]) -> None:
        with contextlib.suppress(SessionKVError):
            await making
        with contextlib.suppress(SessionNotFound):
            await self._client.delete(name)


async def _told(work: Coroutine[Any, Any, object]) -> None:
    """Where it fails the log says so; what it leaves runs out, or is tried again."""
    try:
        await work
    except SessionKVError as error:
        _log.warning("what a response left could not be settled: %s", error.message)


def _never() -> None:
    """No reply ends before the model ends it."""
