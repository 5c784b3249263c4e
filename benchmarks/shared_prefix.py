"""Eight requests at once that share a prefix: cache warm, all cold at once, cache off."""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.engines import exactly, private_engine
from benchmarks.peer import random_tokens
from benchmarks.report import Options, Row, median_row, ratio_row

ABOUT = "mean TTFT of 8 requests at once, 512 shared + 64 own tokens, 64 generated"
REQUESTS = 8
SHARED = 512
OWN = 64
GENERATED = 64


def _mean_ttft_ms(client: Any, shared: list[int], seed: int) -> float:
    def one(index: int) -> float:
        tokens = shared + random_tokens(OWN, seed * REQUESTS + index)
        return client.generate(tokens=tokens, sampling=exactly(GENERATED)).cache.ttft_ms

    with ThreadPoolExecutor(REQUESTS) as pool:
        return statistics.mean(pool.map(one, range(REQUESTS)))


def measure(options: Options) -> list[Row]:
    """Every round has a prefix of its own: first all cold at once, then warm."""
    cold, warm, off = [], [], []
    with private_engine(options) as engine:
        client = engine.client()
        for sample in range(-1, options.repeats):
            shared = random_tokens(SHARED, 5000 + sample)
            figures = [_mean_ttft_ms(client, shared, 10 + 2 * sample + half) for half in (0, 1)]
            if sample >= 0:
                cold.append(figures[0])
                warm.append(figures[1])
    with private_engine(options, prefix_cache=False) as engine:
        client = engine.client()
        for sample in range(-1, options.repeats):
            figure = _mean_ttft_ms(client, random_tokens(SHARED, 5000 + sample), 10 + sample)
            if sample >= 0:
                off.append(figure)
    off_row = median_row("cache off", off, "ms")
    cold_row, warm_row = median_row("all cold at once", cold, "ms"), median_row("warm", warm, "ms")
    return [
        off_row,
        cold_row,
        warm_row,
        ratio_row("warm / off", warm_row, off_row, bound=("<=", 0.4)),
        ratio_row("all cold at once / off", cold_row, off_row, bound=("<=", 0.5)),
    ]
