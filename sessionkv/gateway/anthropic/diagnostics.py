"""Why less of the cache was reused than a client expected, by comparing two of its requests.

Of a request that asks for it a fingerprint is kept under its answer's id, which nobody can guess:
digests and counts, nothing that can be read. What was really reused says the cache report.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sessionkv.gateway.transcript import Message, Transcript

MOST = 10_000
"""Fingerprints that are kept; the oldest go first."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Of one request.

    Attributes:
        model: Its model.
        system: Digest of the system prompt.
        tools: Digest of the tools.
        num_messages: How many messages it has behind the system prompt.
        messages: Digest of them.
        prompt_tokens: Tokens of its prompt, once they are known.
    """

    model: str
    system: bytes
    tools: bytes
    num_messages: int
    messages: bytes
    prompt_tokens: int = 0


class Fingerprints:
    """Those of recent requests. One event loop."""

    def __init__(self) -> None:
        """Start empty."""
        self._known: OrderedDict[str, Fingerprint] = OrderedDict()

    def put(self, message_id: str, found: Fingerprint, *, prompt_tokens: int) -> None:
        """Keep one under the id of its answer."""
        self._known[message_id] = replace(found, prompt_tokens=prompt_tokens)
        if len(self._known) > MOST:
            self._known.popitem(last=False)

    def compare(
        self, previous_id: str | None, model: str, transcript: Transcript, *, cached_tokens: int
    ) -> dict[str, Any] | None:
        """The field ``diagnostics`` of an answer: the first part that is not as it was before.

        None where there is nothing to compare with, or nothing differs. O(conversation).
        """
        if previous_id is None:
            return None
        before = self._known.get(previous_id)
        if before is None:
            return {"cache_miss_reason": {"type": "previous_message_not_found"}}
        now = fingerprint(model, transcript, num_messages=before.num_messages)
        for part in ("model", "system", "tools", "messages"):
            if getattr(before, part) != getattr(now, part):
                missed = max(0, before.prompt_tokens - cached_tokens)
                reason = {"type": f"{part}_changed", "cache_missed_input_tokens": missed}
                return {"cache_miss_reason": reason}
        return None


def fingerprint(
    model: str, transcript: Transcript, *, num_messages: int | None = None
) -> Fingerprint:
    """Of a request, or of its first messages only. O(conversation)."""
    system, rest = _parted(transcript.messages)
    rest = rest[:num_messages]
    tools = list(transcript.tools or ())
    return Fingerprint(model, _digest(list(system)), _digest(tools), len(rest), _digest(list(rest)))


def _parted(messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    has_system = bool(messages) and messages[0].get("role") == "system"
    return messages[: int(has_system)], messages[int(has_system) :]


def _digest(value: list[Any]) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
