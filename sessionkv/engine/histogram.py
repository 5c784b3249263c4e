"""A summary of durations in bounded memory: count, mean and quantiles from log-spaced buckets."""

from __future__ import annotations

import math
from typing import Any

BUCKETS_PER_OCTAVE = 8
"""Neighbouring buckets differ by 9%, so a quantile is off by 4.5% at most."""
_LOWEST_EXPONENT = -20
_OCTAVES = 40
_NUM_BUCKETS = _OCTAVES * BUCKETS_PER_OCTAVE
_FIRST_BOUND, _LAST_BOUND = -13, 11
"""Powers of two in seconds between which fixed buckets are given: 0.1 ms to half an hour."""
_SHORTEST_S = 2.0**_LOWEST_EXPONENT


class Histogram:
    """Durations from 1 us to 12 days; what lies outside counts in the first or last bucket."""

    __slots__ = ("_buckets", "count", "total_s")

    def __init__(self) -> None:
        """Nothing observed."""
        self.count = 0
        self.total_s = 0.0
        self._buckets = [0] * _NUM_BUCKETS

    def observe(self, seconds: float, count: int = 1) -> None:
        """Add ``count`` observations of one length. O(1)."""
        index = 0
        if seconds > _SHORTEST_S:
            index = int((math.log2(seconds) - _LOWEST_EXPONENT) * BUCKETS_PER_OCTAVE)
            if index >= _NUM_BUCKETS:
                index = _NUM_BUCKETS - 1
        self._buckets[index] += count
        self.count += count
        self.total_s += seconds * count

    def quantile_s(self, share: float) -> float:
        """The length that ``share`` of the observations do not exceed; 0 when there are none."""
        wanted = share * self.count
        seen = 0
        for index, count in enumerate(self._buckets):
            seen += count
            if count and seen >= wanted:
                middle = (index + 0.5) / BUCKETS_PER_OCTAVE + _LOWEST_EXPONENT
                return float(2.0**middle)
        return 0.0

    def buckets(self) -> list[list[float]]:
        """``[upper bound in seconds, observations up to it]`` for each power of two in between.

        Exact, but that an observation of just a bound's length counts with the next.
        """
        found: list[list[float]] = []
        start = (_FIRST_BOUND - _LOWEST_EXPONENT) * BUCKETS_PER_OCTAVE
        below = sum(self._buckets[:start])
        for exponent in range(_FIRST_BOUND, _LAST_BOUND + 1):
            found.append([2.0**exponent, below])
            below += sum(self._buckets[start : start + BUCKETS_PER_OCTAVE])
            start += BUCKETS_PER_OCTAVE
        return found

    def to_map(self) -> dict[str, Any]:
        """Count, sum, mean and quantiles, and fixed buckets that add up over time and engines."""
        return {
            "buckets": self.buckets(),
            "sum_s": self.total_s,
            "count": self.count,
            "mean_ms": 1000.0 * self.total_s / self.count if self.count else 0.0,
            "p50_ms": 1000.0 * self.quantile_s(0.50),
            "p90_ms": 1000.0 * self.quantile_s(0.90),
            "p99_ms": 1000.0 * self.quantile_s(0.99),
        }
