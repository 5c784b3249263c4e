"""Our side of a comparison: a private engine, and what a client sees of a turn in time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report import Options
from sessionkv import CacheConfig, EngineConfig, EngineProcess, SamplingParams, launch

MIB = 2**20
CONFIG = EngineConfig(
    log_level="warning",
    cache=CacheConfig(device_bytes=1024 * MIB, host_bytes=512 * MIB, disk_bytes=4096 * MIB),
)

CHECKSUM_CONFIG = EngineConfig(
    model="checksum", log_level="warning", cache=CacheConfig(disk_bytes=256 * MIB)
)
"""Without a model; its tiers stay small, since its blocks are."""


def exactly(count: int) -> SamplingParams:
    """Greedy, this many tokens whatever they are."""
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def private_engine(
    options: Options, *, store: Path | None = None, prefix_cache: bool = True
) -> AbstractContextManager[EngineProcess]:
    """An engine of this benchmark's own."""
    config = replace(
        CONFIG,
        threads=options.threads,
        cache=replace(CONFIG.cache, prefix_cache=prefix_cache),
    )
    return launch(options.model, store=store, config=config)


def event_times(stream: Iterable[Any]) -> list[float]:
    """When each event with tokens came."""
    return [time.perf_counter() for event in stream if event.tokens]


def first_token_s(session: Any, tokens: Sequence[int]) -> float:
    """Seconds from asking until the first token of a one-token turn."""
    start = time.perf_counter()
    return event_times(session.stream(tokens=tokens, sampling=exactly(1)))[0] - start
