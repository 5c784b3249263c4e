"""Whether a history gives the same tokens wherever its KV was: device, host, disk after kill -9.

The new tokens of a turn are computed over the very bytes that were moved, so ids are equal where
all of a history was loaded. Against computing everything anew, sums are grouped otherwise: there
log-probabilities of the same tokens, forced one by one, are compared, and the largest difference is
what 16 bits cost.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.driver import Trace
from benchmarks.gpu.engine import Bench, running
from benchmarks.gpu.setting import Setting
from benchmarks.report import Row
from sessionkv.client import Session
from sessionkv.config import CacheConfig
from sessionkv.types import Tier

GREEDY = {"temperature": 0.0}
FORCED = 8
"""Tokens whose log-probabilities are compared."""
CERTAIN = 1e5
"""Added to a token's score, so that it is the one chosen; log-probabilities are without it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a turn gave whose history was somewhere."""

    ids: tuple[int, ...]
    logprobs: Sequence[float]
    share: float = 1.0


@dataclass(slots=True)
class Turn:
    """One turn that is taken again and again.

    Attributes:
        history: Tokens of the session before it.
        new: What it adds.
        forced: A reply, token by token.
        pool_tokens: Of the device.
    """

    bench: Bench
    session: Session
    history: int
    new: list[int]
    forced: Sequence[int]
    pool_tokens: int
    _fillers: itertools.count[int] = field(default_factory=itertools.count)

    def seen(self, tier: Tier) -> Seen:
        """Ids of a greedy reply, and log-probabilities of the forced one."""
        trace = self._take(tier, self.new, len(self.forced), GREEDY)
        logprobs = [
            _logprob(self._take(tier, [*self.new, *self.forced[:i]], 1, _forced(token)))
            for i, token in enumerate(self.forced)
        ]
        found = getattr(trace.cache, f"{tier.value}_tokens")
        return Seen(trace.tokens, logprobs, min(1.0, found / self.history))

    def _take(self, tier: Tier, tokens: list[int], count: int, sampling: dict[str, Any]) -> Trace:
        if tier is not Tier.DEVICE:
            # So many tokens of another prompt take every block of the device.
            filler = self.bench.tokens(self.pool_tokens, "filler", tier, next(self._fillers))
            self.bench.ask(filler)
        trace = self.bench.ask(tokens, count, session=self.session.name, sampling=sampling)
        self.session.rewind(turns=1)
        return trace


def states_check(setting: Setting) -> list[Row]:
    """The same turn cold, and with its history on the device, in host memory and on disk."""
    scale = setting.scale
    history, block_size = max(scale.parity), CacheConfig().block_size
    pool = -(-2 * history // block_size) + 4
    tiers: dict[str, Any] = {
        "device_blocks": pool,
        "disk_bytes": scale.disk_bytes,
        "durability": "off",
    }
    store = setting.disk / "check"
    with running(
        setting, setting.small, store=store, host_bytes=scale.host_bytes // 4, **tiers
    ) as bench:
        session = bench.open("check")
        log = bench.tokens(history, "check")
        log += bench.ask(log, session=session.name).tokens
        new = bench.tokens(scale.new, "check new")
        cold = _cold(bench, log + new)
        turn = Turn(bench, session, history, new, cold.ids, pool * block_size)
        device, host = turn.seen(Tier.DEVICE), turn.seen(Tier.HOST)
        bench.client.flush()
        bench.process.kill()
    with running(setting, setting.small, store=store, host_bytes=0, **tiers) as bench:
        session = bench.client.session(session.name)
        disk = Turn(bench, session, history, new, cold.ids, pool * block_size).seen(Tier.DISK)
    return [
        *_alike("from host, as on the device", host, device, bound=host.share == 1.0),
        *_alike("from disk after kill -9, as on the device", disk, device, bound=disk.share == 1.0),
        *_alike("on the device, as computed anew", device, cold),
        Row("share of the history loaded from host", host.share, "x"),
        Row("share of the history loaded from disk", disk.share, "x"),
    ]


def _cold(bench: Bench, prompt: list[int]) -> Seen:
    """Everything computed anew for each token."""
    ids = bench.ask(prompt, FORCED, cache=False, sampling=GREEDY).tokens
    traces = [
        bench.ask([*prompt, *ids[:i]], cache=False, sampling=_forced(token))
        for i, token in enumerate(ids)
    ]
    return Seen(ids, [_logprob(trace) for trace in traces])


def _forced(token: int) -> dict[str, Any]:
    return {"temperature": 0.0, "logit_bias": {token: CERTAIN}, "logprobs": 0}


def _logprob(trace: Trace) -> float:
    return float(trace.logprobs[0][0].logprob)


def _alike(name: str, ours: Seen, theirs: Seen, *, bound: bool = False) -> list[Row]:
    """Equal ids before the first difference, and how far log-probabilities lie apart."""
    same = [a == b for a, b in zip(ours.ids, theirs.ids, strict=True)]
    equal, count = [*same, False].index(False), len(same)
    apart = [abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)]
    return [
        Row(f"equal greedy ids {name}", equal, "ids", count, (">=", count) if bound else None),
        Row(f"log-probabilities {name}: largest difference", max(apart), "nats", len(apart)),
        Row(f"log-probabilities {name}: mean", statistics.mean(apart), "nats", len(apart)),
    ]
