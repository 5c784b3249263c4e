"""Cases of an engine whose device holds a part: histories in host memory and on disk, and others.

A history is pushed off the device by visiting others. What it loads and what it computes of one is
the engine's own choice; the shares are reported.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from benchmarks.gpu.driver import Ask, Trace, gaps_ms, one_async
from benchmarks.gpu.engine import Bench
from benchmarks.gpu.resident import Case
from benchmarks.gpu.setting import Scale
from benchmarks.report import Row, median_row, percentile, ratio_row
from sessionkv import AsyncClient
from sessionkv.client import Session

HOST_BARS_MS = {8192: 37.0, 32768: 115.0}
SETTLE_S = 0.5
"""Between two visits: what was taken off the device is copied down meanwhile."""
PINNED = "pinned copy, host to device"
SPILLED_BYTES = 4 * 10**9


def host_cases(scale: Scale) -> dict[str, Case]:
    """By name."""
    return {f"host-{history}": partial(from_host, history=history) for history in scale.histories}


def make_histories(bench: Bench, length: int, count: int) -> list[Session]:
    """New sessions, each with so many tokens of its own."""
    sessions = []
    for number in range(count):
        session = bench.open(f"history-{length}-{number}")
        bench.ask(bench.tokens(length, session.name), session=session.name)
        sessions.append(session)
    return sessions


def visit(bench: Bench, session: Session, *seed: object) -> Trace:
    """A next turn, taken back afterwards."""
    tokens = bench.tokens(bench.scale.new, session.name, *seed)
    trace = bench.ask(tokens, session=session.name)
    session.rewind(turns=1)
    return trace


def delete(sessions: Sequence[Session]) -> None:
    """With all their blocks."""
    for session in sessions:
        session.close(keep=False)


def from_host(bench: Bench, *, history: int) -> list[Row]:
    """Next turns whose history went to host memory; the loads alone against a pinned copy."""
    scale = bench.scale
    sessions = make_histories(bench, history, scale.pool // history + 2)
    rounds = max(2, -(-scale.samples // len(sessions)) + 1)
    traces: list[Trace] = []
    before: tuple[int, float] = (0, 0.0)
    for number in range(rounds):
        for session in sessions:
            time.sleep(0.0 if bench.is_tiny else SETTLE_S)
            traces.append(visit(bench, session, number))
        if number == 0:  # warms up
            traces.clear()
            before = bench.moved().get("host_to_device", (0, 0.0))
    moved, busy_s = bench.moved().get("host_to_device", (0, 0.0))
    delete(sessions)
    name = f"next turn of {scale.new}, {history:,} in host memory"
    shares = [min(1.0, t.cache.host_tokens / history) for t in traces]
    bar = bench.bar("<=", HOST_BARS_MS.get(history, 0.0))
    rows = [
        median_row(name, [t.ttft_ms for t in traces], "ms", bound=bar),
        median_row(f"{name}: share loaded", shares, "x"),
        median_row(f"{name}: loading", [t.cache.fetch_ms for t in traces], "ms"),
        median_row(f"{name}: computing", [t.cache.prefill_ms for t in traces], "ms"),
    ]
    if busy_s > before[1]:
        rate = (moved - before[0]) / (busy_s - before[1]) / 1e9
        rows.append(Row(f"{name}: transfers", rate, "GB/s", len(traces)))
        pinned = bench.setting.known.get(PINNED)
        if pinned is not None:
            bar = bench.bar(">=", 0.9)
            rows.append(ratio_row(f"{name}: transfers / pinned copy", rows[-1], pinned, bound=bar))
    return rows


# -- other streams meanwhile ----------------------------------------------------------------------

Window = tuple[float, float]
Action = Callable[[AsyncClient], Coroutine[Any, Any, list[Window]]]


def while_fetching(bench: Bench) -> list[Row]:
    """Gaps between tokens of streams that decode while histories are loaded for others.

    Only while they load: the new tokens of their turns are then computed in a step of all.
    """
    scale = bench.scale
    history = max(scale.histories)
    sessions = make_histories(bench, history, 2)

    async def fetch(client: AsyncClient) -> list[Window]:
        windows = []
        for number in range(2 * scale.few):
            session = client.session(sessions[number % 2].name)
            tokens = bench.tokens(scale.new, session.name, number)
            trace = await one_async(client, Ask(tokens, session=session.name))
            await session.rewind(turns=1)
            loading_s = (trace.cache.queue_ms + trace.cache.fetch_ms) / 1000.0
            if trace.cache.host_tokens > history // 2:
                windows.append((trace.sent_s, trace.sent_s + loading_s))
        return windows

    with bench.watched():
        rows = asyncio.run(_gaps(bench, f"while {history:,} tokens are fetched", fetch))
    delete(sessions)
    return rows


def while_writing(bench: Bench) -> list[Row]:
    """Gaps between tokens of streams that decode while blocks go from the device to the disk."""
    scale = bench.scale
    length = min(SPILLED_BYTES // bench.shape.kv_bytes, 3 * scale.pool // 5)
    sessions = make_histories(bench, length, 1)

    async def flush(client: AsyncClient) -> list[Window]:
        sent_s = time.perf_counter()
        await client.flush()
        return [(sent_s, time.perf_counter())]

    size = length * bench.shape.kv_bytes / 1e9
    with bench.watched():
        rows = asyncio.run(_gaps(bench, f"while {size:.3g} GB are written", flush))
    delete(sessions)
    return rows


async def _gaps(bench: Bench, name: str, action: Action) -> list[Row]:
    """99th percentiles of streams' gaps before an action and within its windows."""
    count, context, decoded = bench.scale.others
    firsts = [asyncio.Event() for _ in range(count)]
    async with AsyncClient(bench.process.endpoint) as client:
        streams = [
            asyncio.create_task(
                one_async(client, Ask(bench.tokens(context, name, i), decoded), first)
            )
            for i, first in enumerate(firsts)
        ]
        for first in firsts:
            await first.wait()
        begun_s = time.perf_counter()
        await asyncio.sleep(0.02 if bench.is_tiny else 1.5)
        acted_s = time.perf_counter()
        windows = await action(client)
        traces = await asyncio.gather(*streams)
    before = [gap for trace in traces for gap in gaps_ms(trace, begun_s, acted_s)]
    during = [gap for trace in traces for window in windows for gap in gaps_ms(trace, *window)]
    if not during:
        raise RuntimeError("no stream decoded meanwhile")
    label = f"{count} streams, gaps between tokens"
    rows = [
        Row(f"{label} otherwise, p99", percentile(before, 99), "ms", len(before)),
        Row(f"{label} {name}, p99", percentile(during, 99), "ms", len(during)),
        Row(f"{label} otherwise, median", statistics.median(before), "ms", len(before)),
        Row(f"{label} {name}, median", statistics.median(during), "ms", len(during)),
    ]
    bar = bench.bar("<=", 1.05)
    return [*rows, ratio_row(f"{label} {name}, p99 / otherwise", rows[1], rows[0], bound=bar)]
