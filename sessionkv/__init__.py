"""Conversations that keep their KV cache across turns, memory pressure, forks and restarts.

``Client``, ``AsyncClient`` and ``launch`` need only msgpack and pyzmq; ``Engine`` loads the
engine's libraries into this process. Names are imported when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sessionkv.actor.engine import Engine
    from sessionkv.client import AsyncClient, Client
    from sessionkv.client.launch import EngineProcess, launch
    from sessionkv.config import CacheConfig, EngineConfig, LimitsConfig, SchedulerConfig
    from sessionkv.errors import SessionKVError
    from sessionkv.types import CacheReport, FinishReason, MissReason, SamplingParams, Tier, Usage

__version__ = "0.1.0"

_HOMES = {
    "AsyncClient": "sessionkv.client",
    "CacheConfig": "sessionkv.config",
    "CacheReport": "sessionkv.types",
    "Client": "sessionkv.client",
    "Engine": "sessionkv.actor.engine",
    "EngineConfig": "sessionkv.config",
    "EngineProcess": "sessionkv.client.launch",
    "FinishReason": "sessionkv.types",
    "LimitsConfig": "sessionkv.config",
    "MissReason": "sessionkv.types",
    "SamplingParams": "sessionkv.types",
    "SchedulerConfig": "sessionkv.config",
    "SessionKVError": "sessionkv.errors",
    "Tier": "sessionkv.types",
    "Usage": "sessionkv.types",
    "launch": "sessionkv.client.launch",
}

__all__ = [
    "AsyncClient",
    "CacheConfig",
    "CacheReport",
    "Client",
    "Engine",
    "EngineConfig",
    "EngineProcess",
    "FinishReason",
    "LimitsConfig",
    "MissReason",
    "SamplingParams",
    "SchedulerConfig",
    "SessionKVError",
    "Tier",
    "Usage",
    "__version__",
    "launch",
]


def __getattr__(name: str) -> object:
    """Import a public name from its module."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
