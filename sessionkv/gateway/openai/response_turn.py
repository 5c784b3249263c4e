"""A turn that becomes a response: what is to be run, and its running on an engine's session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sessionkv.client.async_client import AsyncSession
from sessionkv.client.async_stream import AsyncStream
from sessionkv.client.options import TurnOptions
from sessionkv.gateway.openai.response_body import KeptResponse

Message = Mapping[str, Any]


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
    kept: KeptResponse
    is_stored: bool

    @property
    def is_passing(self) -> bool:
        """No response is left, and all was sent again: its conversation is found by content.

        Behind an earlier response that was named nothing else is kept, though it begin anew.
        """
        names_earlier = self.kept.echo.get("previous_response_id") is not None
        return self.base is None and not self.is_stored and not names_earlier

    @property
    def response_id(self) -> str:
        """Id of the response."""
        return str(self.kept.echo["id"])


def turn_of(session: AsyncSession, plan: Plan, options: TurnOptions) -> AsyncStream:
    """A plan's turn on the session that was made for it."""
    options = {**options, "metadata": plan.kept.to_metadata()}
    return session.stream(messages=plan.messages, **options)
