"""One response under way: from its request to its last event."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any

from sessionkv.client import StreamEvent, TurnResult
from sessionkv.client.options import TurnOptions
from sessionkv.errors import InvalidRequest, SessionKVError
from sessionkv.gateway.errors import Problem
from sessionkv.gateway.grammars import Demand
from sessionkv.gateway.openai.cache_diagnostics import compared_to, diagnosis
from sessionkv.gateway.openai.conversation_store import ConversationStore
from sessionkv.gateway.openai.response_body import (
    KeptResponse,
    body_of,
    echo_of,
    status_of,
    usage_of,
)
from sessionkv.gateway.openai.response_events import ResponseEvent, ResponseWriter
from sessionkv.gateway.openai.response_ids import new_response_id
from sessionkv.gateway.openai.response_items import namespaces_of
from sessionkv.gateway.openai.response_plan import plan_of
from sessionkv.gateway.openai.response_schema import ResponseRequest
from sessionkv.gateway.openai.response_store import Found, ResponseStore, Standing
from sessionkv.gateway.openai.response_turn import Plan
from sessionkv.gateway.openai.sampling import priority_of, sampling_of, tier_of
from sessionkv.gateway.openai.text_logprobs import TextLogprobs, ToldText
from sessionkv.gateway.replies import ReplyEvent, ReplyParser
from sessionkv.gateway.reports import extension
from sessionkv.gateway.sse import named
from sessionkv.types import FinishReason, SamplingParams

FORM = "text.format"
"""The field of the schema that an answer is held to."""


class ResponseRun:
    """Makes one response. One event loop; :meth:`events` is iterated once.

    Attributes:
        id: Of the response.
        is_settling: Its turn is there: what is left of it is to be let end.
    """

    def __init__(
        self,
        body: ResponseRequest,
        store: ResponseStore,
        conversations: ConversationStore,
        *,
        model: str,
    ) -> None:
        """Start before anything was asked of the engine.

        Args:
            body: The request, checked.
            store: The caller's responses.
            conversations: The caller's.
            model: Its name for clients.
        """
        self._body = body
        self._store = store
        self._conversations = conversations
        self.id = new_response_id()
        self._echo = echo_of(body, self.id, model=model, tier=tier_of(body))
        self._writer = ResponseWriter(
            self.id,
            seals=body.seals_reasoning,
            calls_once=body.parallel_tool_calls is False,
        )
        self._plan: Plan | None = None
        self._logprobs: TextLogprobs | None = None
        self.is_settling = False
        self._is_expected = False

    @property
    def is_streamed(self) -> bool:
        """It was asked for as a stream."""
        return bool(self._body.stream)

    def input_items(self) -> list[dict[str, Any]]:
        """What came in with it; empty before its first event."""
        plan = self._plan
        return [] if plan is None else self._store.items_of(plan.kept, plan.messages)

    async def events(self) -> AsyncGenerator[ResponseEvent, None]:
        """All events; the last one has the whole response, which is there by then.

        What is wrong with the request, or keeps its turn from being taken, is raised before the
        first event.
        """
        async with AsyncExitStack() as held:
            standing = None
            if self._body.conversation_id is not None:
                conversation_id = self._body.conversation_id
                await self._conversations.require(conversation_id)
                held.enter_context(self._conversations.answering(conversation_id))
                await self._conversations.catch_up(conversation_id)
                standing = await self._conversations.standing(conversation_id)
                held.push_async_callback(self._leave, conversation_id)
            async with aclosing(self._all(standing)) as events:
                async for event in events:
                    yield event

    async def _leave(self, conversation_id: str) -> None:
        """Without a turn there is nothing for the conversation to expect; first it has to be gone.

        Where the engine cannot be told, whoever uses the conversation next sees to it.
        """
        if self._is_expected and not self.is_settling and self._plan is not None:
            with suppress(SessionKVError):
                await self._store.forget(self._plan)
                await self._conversations.expect_no_more(conversation_id, self.id)

    async def _all(self, standing: Standing | None) -> AsyncGenerator[ResponseEvent, None]:
        plan = self._plan = await plan_of(self._store, self._body, self._echo, standing)
        self._writer.namespaces = namespaces_of(plan.kept.spaces, plan.tools)
        if plan.messages:
            demand = self._body.demand(plan.tools)
            with demand.naming(FORM):
                async with aclosing(self._run(plan, demand)) as events:
                    async for event in events:
                        yield event
            return
        # A request that says nothing, as clients send it to see who is there.
        if self._body.background:
            why = "at least one item where a response is made in the background"
            raise InvalidRequest("input", [], why)
        self._echo["store"] = False
        for first in self._writer.begin(self._object("in_progress")):
            yield first
        yield self._writer.become(self._object("completed", usage=usage_of({}, ())))

    async def _run(self, plan: Plan, demand: Demand) -> AsyncGenerator[ResponseEvent, None]:
        calls = bool(plan.tools) and plan.kept.calls_tools
        parser, writer = self._store.parser(self.id, calls=calls, tools=plan.tools), self._writer
        other = await self._compare()
        options = TurnOptions(
            sampling=self._sampling(demand),
            priority=priority_of(self._body),
            progress=True,  # so that the first event comes when the turn is taken
        )
        if self._body.num_logprobs is not None:
            style = self._store.style_of(calls=calls)
            self._logprobs = TextLogprobs(style, tops=self._body.num_logprobs)
        if self._body.background:
            await self._store.notes.begin(plan)
            for said in writer.begin(self._object("queued")):
                yield said
        if self._body.conversation_id is not None:
            self._is_expected = True
            await self._conversations.expect(self._body.conversation_id, self.id)
        has_begun = False

        def ends_at() -> int | None:
            return parser.first_call_end if writer.is_over else None

        async with aclosing(self._store.run(plan, options, ends_at)) as running:
            async for event in running:
                if not has_begun:
                    has_begun = True
                    for said in self._taken():
                        yield said
                for said in writer.feed(await self._pieces(parser, event)):
                    yield said
                if event.result is not None:
                    self.is_settling = True
                    is_cut = event.result.finish_reason is FinishReason.LENGTH
                    for said in [*writer.feed(self._rest(parser)), *writer.end(is_cut=is_cut)]:
                        yield said
                    await self._keep()
                    yield writer.become(self._whole(plan, event.result, other))

    def _taken(self) -> list[ResponseEvent]:
        body = self._object("in_progress")
        return [self._writer.become(body)] if self._body.background else self._writer.begin(body)

    async def _pieces(
        self, parser: ReplyParser, event: StreamEvent
    ) -> Sequence[ReplyEvent | ToldText]:
        if self._logprobs is None:
            return parser.feed(event.text) if event.text else ()
        if event.logprobs:
            self._logprobs.take(event.logprobs, await self._store.spelled(event.logprobs))
        return self._logprobs.feed(parser, event.text)

    def _rest(self, parser: ReplyParser) -> Sequence[ReplyEvent | ToldText]:
        rest = parser.end()
        return rest if self._logprobs is None else self._logprobs.told(rest)

    def _sampling(self, demand: Demand) -> SamplingParams:
        """Raises InvalidRequest where a parameter is not allowed."""
        body = self._body
        grammar = demand.grammar(self._store.style)
        (sampling,) = sampling_of(
            body,
            max_tokens=body.max_output_tokens,
            logprobs=body.num_logprobs,
            grammar=grammar,
            fit_window=True,
        )
        return sampling

    async def _keep(self) -> None:
        body = self._body
        if body.conversation_id is not None:
            try:
                await self._conversations.add_response(body.conversation_id, self.id)
            except SessionKVError:
                await self._store.delete(self.id)  # it is in its conversation, or not at all
                await self._conversations.expect_no_more(body.conversation_id, self.id)
                raise
        if body.is_stored and body.pin is not None:
            self._store.pin(self.id, *body.pin)

    async def _compare(self) -> Found | None:
        cache = self._body.prompt_cache_options
        if cache is None or cache.comparison_response_id is None:
            return None
        return await compared_to(self._store, cache.comparison_response_id)

    def _whole(self, plan: Plan, result: TurnResult, other: Found | None) -> dict[str, Any]:
        output = self._writer.output
        counts = {
            "prompt_tokens": result.usage.prompt_tokens,
            "completion_tokens": result.usage.completion_tokens,
            "cached_tokens": result.cache.cached_tokens,
        }
        usage = usage_of(counts, output)
        whole = self._object(status_of(result.finish_reason), output=output, usage=usage)
        report = extension([result], self._store.passing.rewrites)
        if not plan.is_stored:
            report.pop("node", None)
        cache = self._body.prompt_cache_options
        if cache is not None and cache.comparison_response_id is not None:
            whole["prompt_cache_diagnostics"] = diagnosis(other, plan, result)
        return whole | {"sessionkv": report}

    def failed(self, problem: Problem) -> bytes:
        """The last event of a stream that failed after its first, framed."""
        event = self.failure(problem)
        return named(event["type"], event)

    def failure(self, problem: Problem) -> ResponseEvent:
        """The last event of a response that failed after its first."""
        own = problem.openai()["error"]
        codes = {429: "rate_limit_exceeded"} if problem.status < 500 else {}
        fallback = own["code"] if problem.status < 500 else "server_error"
        error = {**own, "code": codes.get(problem.status, fallback)}
        return self._writer.become(self._object("failed", output=self._writer.output, error=error))

    def cancelled(self) -> ResponseEvent:
        """The last event of a response that was cancelled."""
        return self._writer.become(self._object("cancelled", output=self._writer.output))

    async def settle(self, body: Mapping[str, Any]) -> None:
        """Have it noted how a response in the background ended; one that failed is not there.

        Raises:
            SessionKVError: The engine cannot do that.
        """
        if self._plan is not None:
            if body["status"] in ("failed", "cancelled"):
                await self._store.forget(self._plan)
            await self._store.notes.end(self._plan, body)

    def _object(self, status: str, **outcome: Any) -> dict[str, Any]:
        if self._plan is None:
            return body_of(KeptResponse(self._echo), (), status=status, **outcome)
        return body_of(self._plan.kept, self._plan.tools, status=status, **outcome)
