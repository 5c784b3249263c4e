"""Answers that are not stored: no response is left, but the conversation is found again.

Clients that say ``store: false`` send everything again with each request, as those of Chat
Completions do, and coding agents among them talk for hours. So their conversations are found by
their content too, after a restart as well; under a response's id there is nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing

from sessionkv.client import StreamEvent, TurnResult
from sessionkv.client.options import TurnOptions
from sessionkv.gateway.conversations import Conversations
from sessionkv.gateway.helpers import is_helper
from sessionkv.gateway.keeping import Keeping, named, says_steady
from sessionkv.gateway.openai.response_turn import Plan
from sessionkv.gateway.transcript import Message, Transcript


class PassingResponses:
    """Runs plans that are not stored and begin anew, for one request. One event loop.

    Attributes:
        rewrites: What the model saw elsewhere than the client has it, once a turn has begun.
    """

    def __init__(self, conversations: Conversations, headers: Mapping[str, str]) -> None:
        """Over a caller's conversations.

        Args:
            conversations: The caller's.
            headers: Of the request.
        """
        self._conversations = conversations
        self._headers = headers
        self.rewrites: Sequence[Mapping[str, str]] = ()

    async def run(
        self,
        plan: Plan,
        options: TurnOptions,
        ends_at: Callable[[], int | None],
        reply_of: Callable[[TurnResult], Message | None] | None,
    ) -> AsyncGenerator[StreamEvent, None]:
        """Run a plan; by its last event the conversation can be found.

        Args:
            plan: What is to be run.
            options: Sampling and priority.
            ends_at: Asked after each event: after how many characters the reply ends, if it does.
            reply_of: The answer as the client will send it back; None where that is no one message.
                Without it nothing is kept.

        Raises:
            SessionKVError: The turn failed.
        """
        transcript = _transcript(plan)
        keeping = Keeping(is_helper=True) if reply_of is None else self._keeping(plan, transcript)
        exchange = self._conversations.begin(transcript, keeping)
        exchange.ends_at = ends_at
        try:
            async with aclosing(exchange.stream(**options)) as events:
                async for event in events:
                    self.rewrites = exchange.rewrites
                    reply = reply_of(event.result) if reply_of and event.result else None
                    if reply is not None:
                        exchange.keep(reply)
                        await exchange.kept()
                    yield event
        finally:
            await exchange.close()

    async def count(self, plan: Plan) -> int:
        """How many prompt tokens a plan would have, were it run now; nothing is made for it.

        Raises:
            SessionKVError: They cannot be counted.
        """
        transcript = _transcript(plan)
        exchange = self._conversations.begin(transcript, self._keeping(plan, transcript))
        return await exchange.count()

    def _keeping(self, plan: Plan, transcript: Transcript) -> Keeping:
        echo = plan.kept.echo
        helper = is_helper(
            transcript,
            headers=self._headers,
            metadata=echo.get("metadata"),
            max_tokens=echo.get("max_output_tokens"),
        )
        label = echo.get("prompt_cache_key") or named(self._headers)
        return Keeping(is_helper=helper, label=label, is_steady=says_steady(self._headers))


def _transcript(plan: Plan) -> Transcript:
    system = [] if plan.system is None else [{"role": "system", "content": plan.system}]
    return Transcript([*system, *plan.messages], plan.tools or None)
