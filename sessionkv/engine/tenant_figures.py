"""What the engine counts of each tenant, and what a tenant is shown: its own and nothing else.

Kept for tenants that have a key, so in bounded number. Core thread only; times are arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sessionkv.engine.histogram import Histogram
from sessionkv.engine.messages import TurnFinished


@dataclass(slots=True)
class _Figures:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    generation_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    miss_turns: Counter[str] = field(default_factory=Counter)
    miss_tokens: Counter[str] = field(default_factory=Counter)
    latency: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram() for name in ("ttft", "e2e", "queue", "prefill")}
    )


class TenantFigures:
    """Counters by tenant."""

    def __init__(self) -> None:
        """No tenant is known."""
        self._of: dict[str, _Figures] = {}

    @property
    def tenants(self) -> tuple[str, ...]:
        """Those that are counted."""
        return tuple(self._of)

    def set_tenants(self, tenants: Iterable[str]) -> None:
        """Count these from now on, and forget the others."""
        self._of = {tenant: self._of.get(tenant, _Figures()) for tenant in tenants}

    def turn_finished(self, tenant: str, finished: TurnFinished, e2e_s: float) -> None:
        """A turn of the tenant was committed, ``e2e_s`` after it came in."""
        of = self._of.get(tenant)
        if of is None:
            return
        cache = finished.cache
        of.finished[finished.reason.value] += 1
        of.prompt_tokens += cache.prompt_tokens
        of.cached_tokens += cache.prompt_tokens - cache.computed_tokens
        of.recomputed_tokens += cache.recomputed_tokens
        of.generation_tokens += finished.num_output_tokens
        of.miss_turns[cache.miss.reason.value] += 1
        of.miss_tokens.update(cache.miss_tokens)
        of.latency["e2e"].observe(e2e_s)
        of.latency["ttft"].observe(cache.ttft_ms / 1000.0)
        of.latency["queue"].observe(cache.queue_ms / 1000.0)
        of.latency["prefill"].observe(cache.prefill_ms / 1000.0)

    def turn_dropped(self, tenant: str, code: str) -> None:
        """A turn of the tenant ended with the error of this code."""
        of = self._of.get(tenant)
        if of is not None:
            of.failed[code] += 1

    def snapshot(self, tenant: str) -> dict[str, Any]:
        """A tenant's counters as plain values, named as in the whole engine's."""
        of = self._of.get(tenant, _Figures())
        rate = of.cached_tokens / of.prompt_tokens if of.prompt_tokens else 0.0
        return {
            "requests_finished": dict(of.finished),
            "requests_failed": dict(of.failed),
            "prompt_tokens": of.prompt_tokens,
            "generation_tokens": of.generation_tokens,
            "recomputed_tokens": of.recomputed_tokens,
            "prefix_cache": {
                "queries_tokens": of.prompt_tokens,
                "hits_tokens": of.cached_tokens,
                "hit_rate": rate,
            },
            "miss_tokens": dict(of.miss_tokens),
            "miss_turns": dict(of.miss_turns),
            "latency": {name: found.to_map() for name, found in of.latency.items()},
        }
