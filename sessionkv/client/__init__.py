"""Clients of an engine, blocking and asyncio; they need only msgpack and pyzmq.

``AsyncClient`` and its kin are loaded when first asked for, so that a blocking program does not
load asyncio.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sessionkv.client.client import Client, Session
from sessionkv.client.results import (
    PinInfo,
    Places,
    PromptProgress,
    Served,
    SessionInfo,
    SessionPage,
    StreamEvent,
    TierBytes,
    TurnResult,
)
from sessionkv.client.stream import Stream

if TYPE_CHECKING:
    from sessionkv.client.async_client import AsyncClient, AsyncSession
    from sessionkv.client.async_stream import AsyncStream

_ASYNC = {
    "AsyncClient": "sessionkv.client.async_client",
    "AsyncSession": "sessionkv.client.async_client",
    "AsyncStream": "sessionkv.client.async_stream",
}

__all__ = [
    "AsyncClient",
    "AsyncSession",
    "AsyncStream",
    "Client",
    "PinInfo",
    "Places",
    "PromptProgress",
    "Served",
    "Session",
    "SessionInfo",
    "SessionPage",
    "Stream",
    "StreamEvent",
    "TierBytes",
    "TurnResult",
]


def __getattr__(name: str) -> Any:
    if name in _ASYNC:
        return getattr(importlib.import_module(_ASYNC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
