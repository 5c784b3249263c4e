"""What is noted of responses that are made in the background, so that none is forgotten.

A response that is there needs no note. Of one that is being made a session ``~http:begun:ID`` has
the root that it begins with and what its object repeats of its request; of one that failed or was
cancelled ``~http:ended:ID`` has that and how it ended. So after a crash a response is there, or has
ended, or was begun by a gateway that is no more: then it has failed, unless the engine has its
turn under way. Notes run out by themselves, 30 days later, as responses do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sessionkv.client import AsyncClient
from sessionkv.client.results import NodeInfo
from sessionkv.errors import ResponseNotFound, SessionNotFound
from sessionkv.gateway.openai.response_body import KeptResponse, body_of
from sessionkv.gateway.openai.response_ids import BEGUN, ENDED, is_response_id, session_of
from sessionkv.gateway.openai.response_turn import Plan

_OUTCOME = "outcome"
_LEFT: Mapping[str, Any] = {
    "status": "failed",
    "error": {
        "code": "server_error",
        "message": "the server ended before the response did: ask again",
    },
}


@dataclass(frozen=True, slots=True)
class NotedResponse:
    """A response that is not there, and why.

    Attributes:
        node: Root of what it would have been.
        kept: What its object repeats of its request.
        outcome: Status and error.
    """

    node: NodeInfo
    kept: KeptResponse
    outcome: Mapping[str, Any]

    @property
    def was_left(self) -> bool:
        """It was begun, and its gateway ended before it did."""
        return self.outcome is _LEFT

    def body(self) -> dict[str, Any]:
        """The whole object."""
        status, error = self.outcome["status"], self.outcome.get("error")
        return body_of(self.kept, self.node.tools, status=status, error=error)


class BackgroundNotes:
    """Those of one caller. One event loop."""

    def __init__(self, client: AsyncClient) -> None:
        """Over a caller's connection."""
        self._client = client

    async def begin(self, plan: Plan) -> None:
        """A response is going to be made.

        Raises:
            InvalidRequest: More is to be kept with it than may be.
            Overloaded: There is no room for it.
        """
        await self._note(BEGUN, plan, {})

    async def end(self, plan: Plan, body: Mapping[str, Any]) -> None:
        """It is there, or never will be.

        Args:
            plan: The one that was begun.
            body: Its object at the end.
        """
        if body["status"] in ("failed", "cancelled"):
            outcome = {name: body[name] for name in ("status", "error")}
            await self._note(ENDED, plan, {_OUTCOME: outcome})
        await self._forget(BEGUN + plan.response_id)

    async def find(self, response_id: str) -> NotedResponse:
        """One that is not being made now, and is not there.

        Raises:
            ResponseNotFound: There is no such note.
        """
        if is_response_id(response_id):
            for prefix in (ENDED, BEGUN):
                with contextlib.suppress(SessionNotFound):
                    node = await self._client.session(prefix + response_id).node()
                    kept = KeptResponse.of(node)
                    if kept is not None:
                        outcome = node.metadata.get(_OUTCOME) or await self._unended(response_id)
                        return NotedResponse(node, kept, outcome)
        raise ResponseNotFound(response_id)

    async def _unended(self, response_id: str) -> Mapping[str, Any]:
        """What became of one that was only begun: if its turn is under way, another makes it."""
        found = await self._client.sessions(session_of(response_id))
        is_made = any(info.running or info.queued for info in found)
        return {"status": "in_progress"} if is_made else _LEFT

    async def delete(self, response_id: str) -> None:
        """Forget what was noted."""
        for prefix in (ENDED, BEGUN):
            await self._forget(prefix + response_id)

    async def _note(self, prefix: str, plan: Plan, more: Mapping[str, Any]) -> None:
        await self._client.open(
            prefix + plan.response_id,
            system=plan.system,
            tools=plan.tools or None,
            metadata={**plan.kept.to_metadata(), **more},
        )

    async def _forget(self, name: str) -> None:
        with contextlib.suppress(SessionNotFound):
            await self._client.delete(name)
