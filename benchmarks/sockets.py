"""What the socket adds to a turn, and what a streamed event costs. No model."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.engines import CHECKSUM_CONFIG, exactly
from benchmarks.report import Options, Row, median_row, percentile
from sessionkv import Engine, launch

ABOUT = "one-token turns over the socket against the embedded engine, checksum runner"
TURNS = 500
EVENTS = 400


def _turn_times_us(client: Any) -> list[float]:
    times = []
    for number in range(TURNS + 50):
        start = time.perf_counter()
        client.generate(tokens=[number % 200, 1, 2], sampling=exactly(1))
        times.append((time.perf_counter() - start) * 1e6)
    return times[50:]


def _event_us(client: Any, streams: int) -> float:
    """Wall time over all events of all streams."""

    def one(index: int) -> int:
        session = client.open(f"e-{streams}-{index}")
        stream = session.stream(tokens=[index, 1, 2], sampling=exactly(EVENTS))
        count = sum(len(event.tokens) for event in stream)
        session.close(keep=False)
        return count

    with ThreadPoolExecutor(streams) as pool:
        start = time.perf_counter()
        events = sum(pool.map(one, range(streams)))
        return (time.perf_counter() - start) / events * 1e6


def measure(options: Options) -> list[Row]:
    """Both engines in turn; added is the difference of the same percentile."""
    config = CHECKSUM_CONFIG
    with Engine(config) as embedded:
        inside = [_turn_times_us(embedded) for _ in range(options.repeats)]
    with launch(config=config) as engine:
        client = engine.client()
        across = [_turn_times_us(client) for _ in range(options.repeats)]
        events = {
            streams: [_event_us(client, streams) for _ in range(options.repeats)]
            for streams in (1, 64)
        }
    rows = []
    for percent, limit in ((50, 300.0), (99, 1000.0)):
        sides = [[percentile(times, percent) for times in side] for side in (across, inside)]
        rows.append(median_row(f"socket, p{percent} of a 1-token turn", sides[0], "us"))
        rows.append(median_row(f"embedded, p{percent}", sides[1], "us"))
        added = [a - b for a, b in zip(sorted(sides[0]), sorted(sides[1]), strict=True)]
        rows.append(
            median_row(f"added by the socket, p{percent}", added, "us", bound=("<=", limit))
        )
    for streams, samples in events.items():
        rows.append(median_row(f"a streamed token, {streams} streams", samples, "us"))
    return rows
