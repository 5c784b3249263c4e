"""What the gateway is told, as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sessionkv.types.reply_style import ReplyStyle


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Where the engine is, and the gateway's own bounds.

    ``sessionkv serve`` says where and who may call; bounds of its own are for who starts a gateway
    by hand.

    Attributes:
        endpoint: The engine's socket.
        ping_s: A stream that has had nothing to say for so long says that it lives.
        body_bytes: Largest request body, also where the engine would take a larger one; beyond
            what either takes the answer is 413.
        body_pause_s: A body of which nothing comes for so long is given up, with 408.
        body_bytes_per_s: So is one that comes more slowly on the whole, beyond its first pause.
        header_s: So is a request whose headers are not there by then.
        unread_s: A client that reads nothing of an answer for so long is cut off.
        idle_s: A connection that has had no request for so long is closed.
        connections: Most at once; a quarter of them may be at work, shared by tenants.
        reply_style: How the model writes tool calls and reasoning, where the engine's own finding
            is to be overruled.
        clients: Connections to the engine, one for each key, past which idle ones are closed.
        key: The gateway's own, for what it asks before anybody calls; None where the engine has no
            keys. With one, callers have to show theirs.
        hosts: Names beside those of this machine that callers may use for it.
        cors_origins: Origins whose pages may call; none by default.
        steady_prompts: Dates and reminders that agents move around in their prompts are put where
            they cost no cache, unless a request says otherwise.
    """

    endpoint: str
    ping_s: float = 10.0
    body_bytes: int = 32 * 1024**2
    body_pause_s: float = 30.0
    body_bytes_per_s: int = 4096
    header_s: float = 10.0
    unread_s: float = 60.0
    idle_s: int = 65
    connections: int = 8192
    clients: int = 64
    key: str | None = None
    hosts: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    reply_style: ReplyStyle | None = None
    steady_prompts: bool = False

    def to_json(self) -> str:
        """One line, for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_map(cls, values: Mapping[str, Any]) -> GatewaySettings:
        """From :meth:`to_json`'s map."""
        style = values.get("reply_style")
        return cls(**{**values, "reply_style": style and ReplyStyle.from_map(style)})
