"""Sessions that are likely to be back soon: those whose last turn ended in a tool call.

A tool takes seconds where a person takes minutes, so plain order of use keeps the wrong ones: what
a session has when its turn ends in a call is *expected* (above what is merely retained, below
every pin) for as long as nine in ten of its tenant's calls have taken lately. That only orders
eviction. At most half of memory is expected at a time; past that, the calls made longest ago are
no longer waited for.

Told of turns by the engine; times are arguments. Knows keys of blocks, no places. One thread.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from sessionkv.cache.retention import Retention
from sessionkv.cache.turns import HeadId
from sessionkv.types import BlockHash

DEFAULT_TTL_S, MAX_TTL_S = 30.0, 600.0
QUANTILE, MARGIN = 0.9, 1.25
"""Part of the past gaps that a wait covers, and how much longer it is than that."""
GAPS, LEAST_GAPS = 64, 4
"""Gaps remembered of a tenant, and those from which on they count."""
MAX_TENANTS, MAX_CALLS = 1024, 65_536


@dataclass(slots=True, eq=False)
class _Hold:
    """What is held for one session, and until when."""

    hashes: Sequence[BlockHash]
    tail: tuple[BlockHash, ...]
    until_s: float

    def __len__(self) -> int:
        return len(self.hashes) + len(self.tail)


class ExpectedReturns:
    """Learns how long calls take and holds what their sessions have for so long."""

    def __init__(self, retention: Retention, *, max_blocks: int) -> None:
        """Start with nothing learned.

        Args:
            retention: Told which keys are expected.
            max_blocks: Most blocks held at a time, each as often as sessions hold it.
        """
        self._retention = retention
        self._max_blocks = max_blocks
        self._gaps: OrderedDict[str, deque[float]] = OrderedDict()
        self._called_s: OrderedDict[HeadId, float] = OrderedDict()
        self._holds: OrderedDict[HeadId, _Hold] = OrderedDict()
        self._ends: list[tuple[float, HeadId]] = []
        self.num_blocks = 0
        """Blocks held now, each as often as sessions hold it."""

    def __len__(self) -> int:
        """Sessions held for."""
        return len(self._holds)

    def ttl_s(self, tenant: str) -> float:
        """How long a call of the tenant is waited for."""
        gaps = self._gaps.get(tenant, ())
        if len(gaps) < LEAST_GAPS:
            return DEFAULT_TTL_S
        quantile = sorted(gaps)[int(QUANTILE * (len(gaps) - 1))]
        return min(quantile * MARGIN, MAX_TTL_S)

    def turn_began(self, head: HeadId, now: float) -> None:
        """The session is back, if it was waited for; what is held stays for the turn's time."""
        called_s = self._called_s.pop(head, None)
        if called_s is not None:
            self._learn(head[0], now - called_s)
        hold = self._holds.get(head)
        if hold is not None:
            self._hold_until(head, hold, now + MAX_TTL_S)

    def called(
        self, head: HeadId, hashes: Sequence[BlockHash], tail: BlockHash | None, now: float
    ) -> None:
        """The session's turn ended in a call. O(what is new since the last one of its chain).

        Args:
            head: The session.
            hashes: Full blocks of its log, from the first.
            tail: The unfilled one behind them.
            now: Seconds.
        """
        self._called_s[head] = now
        if len(self._called_s) > MAX_CALLS:
            self._called_s.popitem(last=False)
        old = self._holds.pop(head, None)
        new = _Hold(hashes, () if tail is None else (tail,), now + self.ttl_s(head[0]))
        known = 0
        if old is not None:
            known = len(old.hashes) if hashes[: len(old.hashes)] == old.hashes else 0
        # First what is new: what both hold must not look fallen in between.
        self._retention.expect((*hashes[known:], *new.tail))
        if old is not None:
            self._retention.unexpect((*(() if known else old.hashes), *old.tail))
            self.num_blocks -= len(old)
        self._holds[head] = new
        self.num_blocks += len(new)
        self._hold_until(head, new, new.until_s)
        while self.num_blocks > self._max_blocks:
            self._let_go(next(iter(self._holds)))

    def forget(self, head: HeadId) -> None:
        """The session is not waited for: its turn ended in another way."""
        self._called_s.pop(head, None)
        if head in self._holds:
            self._let_go(head)

    def expire(self, now: float) -> None:
        """Wait no longer for those whose time is over. O(log sessions) each."""
        while self._ends and self._ends[0][0] <= now:
            until_s, head = heapq.heappop(self._ends)
            hold = self._holds.get(head)
            if hold is not None and hold.until_s == until_s:
                self._let_go(head)

    def _hold_until(self, head: HeadId, hold: _Hold, until_s: float) -> None:
        hold.until_s = until_s
        heapq.heappush(self._ends, (until_s, head))

    def _let_go(self, head: HeadId) -> None:
        hold = self._holds.pop(head)
        self.num_blocks -= len(hold)
        self._retention.unexpect((*hold.hashes, *hold.tail))

    def _learn(self, tenant: str, gap_s: float) -> None:
        gaps = self._gaps.pop(tenant, None)
        if gaps is None:
            gaps = deque(maxlen=GAPS)
            if len(self._gaps) >= MAX_TENANTS:
                self._gaps.popitem(last=False)
        gaps.append(gap_s)
        self._gaps[tenant] = gaps
