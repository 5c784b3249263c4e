"""What the socket adds to a turn, and what a streamed event costs. No model.

Beside it what the machine itself takes for the same frames and threads: what an engine adds can be
no less than that, and on a virtual machine most of it is threads that are woken.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.echo import echo_times_us, wake_times_us
from benchmarks.engines import CHECKSUM_CONFIG, exactly
from benchmarks.report import Options, Row, median_row, percentile
from sessionkv import Engine, launch

ABOUT = "one-token turns over the socket against the embedded engine, checksum runner"
TURNS = 500
WARM_UP = 50
EVENTS = 400
REQUEST_BYTES, ANSWER_BYTES = 95, 392
"""Of the frames of a one-token generation."""

_PERCENTS = ((50, 300.0), (99, 1000.0))
"""And the bound of what the socket adds."""


def _times_us(one: Callable[[int], Any]) -> list[float]:
    times = []
    for number in range(TURNS + WARM_UP):
        start = time.perf_counter()
        one(number)
        times.append((time.perf_counter() - start) * 1e6)
    return times[WARM_UP:]


def _generation_times_us(client: Any) -> list[float]:
    return _times_us(lambda n: client.generate(tokens=[n % 200, 1, 2], sampling=exactly(1)))


def _turn_times_us(client: Any) -> list[float]:
    """Of a session: each is in the journal when it is answered."""
    session = client.open("t")
    times = _times_us(lambda n: session.turn(tokens=[n % 200, 1, 2], sampling=exactly(1)))
    session.close(keep=False)
    return times


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


def _percentile_rows(name: str, repeats: list[list[float]]) -> list[Row]:
    return [
        median_row(f"{name}, p{percent}", [percentile(times, percent) for times in repeats], "us")
        for percent, _ in _PERCENTS
    ]


def measure(options: Options) -> list[Row]:
    """Both engines in turn; added is the difference of the same percentile."""
    repeats = range(options.repeats)
    with Engine(CHECKSUM_CONFIG) as embedded:
        inside = [_generation_times_us(embedded) for _ in repeats]
        inside_turns = [_turn_times_us(embedded) for _ in repeats]
    with launch(config=CHECKSUM_CONFIG) as engine:
        client = engine.client()
        across = [_generation_times_us(client) for _ in repeats]
        across_turns = [_turn_times_us(client) for _ in repeats]
        events = {streams: [_event_us(client, streams) for _ in repeats] for streams in (1, 64)}
    rows = []
    for percent, limit in _PERCENTS:
        sides = [[percentile(times, percent) for times in side] for side in (across, inside)]
        rows.append(median_row(f"socket, p{percent} of a 1-token generation", sides[0], "us"))
        rows.append(median_row(f"embedded, p{percent}", sides[1], "us"))
        added = [a - b for a, b in zip(sorted(sides[0]), sorted(sides[1]), strict=True)]
        rows.append(
            median_row(f"added by the socket, p{percent}", added, "us", bound=("<=", limit))
        )
    rows += _percentile_rows("socket, a turn of a session", across_turns)
    rows += _percentile_rows("embedded, a turn of a session", inside_turns)
    for streams, samples in events.items():
        rows.append(median_row(f"a streamed token, {streams} streams", samples, "us"))
    rows += _percentile_rows("machine: a thread is woken", [wake_times_us(TURNS) for _ in repeats])
    echoes = [
        echo_times_us(TURNS, request_bytes=REQUEST_BYTES, answer_bytes=ANSWER_BYTES)
        for _ in repeats
    ]
    rows += _percentile_rows("machine: such frames through zmq alone", echoes)
    return rows
