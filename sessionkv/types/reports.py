"""What a turn cost and why: usage, the cache report, finish reasons."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class FinishReason(enum.Enum):
    """Why a turn ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class MissReason(enum.Enum):
    """Why a token of the known history was computed again (see ``docs/architecture.md``)."""

    NONE = "none"
    FIRST_TURN = "first_turn"
    EVICTED = "evicted"
    EXPIRED = "expired"
    NOT_STORED = "not_stored"
    NOT_MATCHED = "not_matched"
    CORRUPT = "corrupt"
    IDENTITY_CHANGED = "identity_changed"
    TENANT = "tenant"
    TEMPLATE_REWROTE = "template_rewrote"
    HISTORY_EDITED = "history_edited"
    RECOMPUTE_WAS_SOONER = "recompute_was_sooner"
    CACHE_OFF = "cache_off"
    BYPASSED = "bypassed"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one turn."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class MissReport:
    """The first position that was in the known history and yet was computed.

    Attributes:
        reason: Why.
        token: Position in the prompt, None when nothing was missed.
        turn: Number of the turn in the session (0 is the root), where known.
        message: Index of the message within the request, where known; a system prompt is the first.
        expected: What the stored history has there, decoded, where the two differ.
        found: What the request has there, decoded, where the two differ.
        part: What of the request differs there: ``"system"``, ``"tools"`` or ``"message"``; over
            HTTP the field of its body.
    """

    reason: MissReason = MissReason.NONE
    token: int | None = None
    turn: int | None = None
    message: int | None = None
    expected: str | None = None
    found: str | None = None
    part: str | None = None

    def __str__(self) -> str:
        """``no miss``, or the reason with the place and what differed."""
        if self.reason is MissReason.NONE:
            return "no miss"
        text = f"miss: {self.reason.value}"
        if self.token is not None and self.reason is not MissReason.FIRST_TURN:
            text += f" from token {self.token:,}"
            if self.turn is not None:
                text += f" (turn {self.turn})"
            if self.part not in (None, "message"):
                text += f" in {self.part}"
        if self.expected is not None or self.found is not None:
            text += f", {self.expected!r} became {self.found!r}"
        return text


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Where a turn's prompt came from, exactly: each position by how its KV first came about.

    ``device_tokens + host_tokens + disk_tokens + computed_tokens == prompt_tokens``, always. Work
    done again after a preemption is ``recomputed_tokens``, outside the sum. Times in milliseconds.
    """

    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    computed_tokens: int
    recomputed_tokens: int = 0
    queue_ms: float = 0.0
    fetch_ms: float = 0.0
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    decode_tokens_per_s: float = 0.0
    miss: MissReport = field(default_factory=MissReport)
    miss_tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.device_tokens + self.host_tokens + self.disk_tokens

    def __str__(self) -> str:
        """Where the prompt came from, how fast it went and why anything was missed, on one line."""
        parts = [
            f"prompt {self.prompt_tokens:,} = {self.device_tokens:,} device"
            f" + {self.host_tokens:,} host + {self.disk_tokens:,} disk"
            f" + {self.computed_tokens:,} computed",
            f"first token {self.ttft_ms:,.0f} ms",
        ]
        if self.decode_tokens_per_s:
            parts.append(f"{self.decode_tokens_per_s:,.1f} tok/s")
        if self.recomputed_tokens:
            parts.append(f"{self.recomputed_tokens:,} recomputed")
        return " · ".join([*parts, str(self.miss)])
