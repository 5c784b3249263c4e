"""Many conversations over too small a device, and many requests at once."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import deque

from benchmarks.gpu.driver import Ask, Trace, one_async
from benchmarks.gpu.engine import Bench
from benchmarks.report import Row, percentile
from sessionkv import AsyncClient

CAPACITY = "0.6b"


def pressure(bench: Bench) -> list[Row]:
    """Conversations in turn, some at a time; the device holds a part of their KV."""
    conversations, turns, _ = bench.scale.conversations
    with bench.watched(300.0):
        traces, wall_s = asyncio.run(_converse(bench))
    added = bench.scale.added
    known = sum(trace.cache.prompt_tokens - added for trace in traces)
    found = {
        tier: sum(getattr(trace.cache, f"{tier}_tokens") for trace in traces)
        for tier in ("device", "host", "disk")
    }
    ttfts = [trace.ttft_ms for trace in traces]
    again = sum(trace.cache.recomputed_tokens for trace in traces)
    name = f"{conversations} conversations of {turns} turns"
    generated = sum(len(trace.tokens) for trace in traces)
    return [
        Row(f"{name}, wall", wall_s, "s", bound=bench.bar("<=", 38.0)),
        Row(f"{name}, output", generated / wall_s, "tok/s"),
        Row(
            f"{name}, mean first token",
            statistics.mean(ttfts), "ms", len(ttfts), bench.bar("<=", 130.0), tuple(ttfts),
        ),
        Row(f"{name}, median first token", statistics.median(ttfts), "ms", len(ttfts)),
        Row(f"{name}, p95 first token", percentile(ttfts, 95), "ms", len(ttfts)),
        *(
            Row(f"{name}, mean {label}", statistics.mean(parts), "ms", len(parts))
            for label, parts in {
                "queueing": [trace.cache.queue_ms for trace in traces],
                "loading": [trace.cache.fetch_ms for trace in traces],
                "computing": [trace.cache.prefill_ms for trace in traces],
            }.items()
        ),
        Row(f"{name}, history reused", sum(found.values()) / known, "x", len(ttfts)),
        *(Row(f"{name}, history from {tier}", n / known, "x") for tier, n in found.items()),
        Row(f"{name}, computed again after preemption", again, "tokens"),
    ]  # fmt: skip


async def _converse(bench: Bench) -> tuple[list[Trace], float]:
    """All turns, conversation after conversation, so many at a time; and how long that took."""
    scale = bench.scale
    count, turns, width = scale.conversations
    traces: list[Trace] = []
    async with AsyncClient(bench.process.endpoint) as client:
        stamp = time.monotonic_ns()
        sessions = [await client.open(f"talk-{stamp}-{i}") for i in range(count)]
        free = [asyncio.Lock() for _ in range(count)]
        queue = deque((turn, i) for turn in range(turns) for i in range(count))
        news = {at: bench.tokens(scale.added, "talk", *at) for at in queue}

        async def work() -> None:
            while queue:
                at = queue.popleft()
                async with free[at[1]]:
                    ask = Ask(news[at], scale.generated, session=sessions[at[1]].name)
                    traces.append(await one_async(client, ask))

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(width)))
        wall_s = time.perf_counter() - began
        for session in sessions:
            await session.close(keep=False)
    return traces, wall_s


def requests_at_once(bench: Bench, *, shift: int, name: str) -> list[Row]:
    """Prompts and replies of random lengths, all asked for at once; tokens a second over all.

    The lengths, and without ``shift`` the ids, are those of nano-vllm's own benchmark.
    """
    count, least, most = bench.scale.nano
    source = random.Random(0)
    vocab = min(bench.shape.vocab, 10_001)

    def prompt() -> list[int]:
        length = source.randint(least, most)
        return [(source.randint(0, 10_000) + shift) % vocab for _ in range(length)]

    prompts = [prompt() for _ in range(count)]
    counts = [source.randint(least, most) for _ in range(count)]
    asks = [Ask(tokens, n) for tokens, n in zip(prompts, counts, strict=True)]
    if not shift:
        bench.together([Ask(bench.tokens(least, "warm", i), 16) for i in range(4)])
    traces = bench.together(asks)
    wall_s = max(t.last_s for t in traces) - min(t.sent_s for t in traces)
    bar = bench.bar(">=", 19_497.0, model=CAPACITY)
    return [
        Row(f"{count} requests at once, {name}", sum(counts) / wall_s, "tok/s", bound=bar),
        Row(f"{count} requests at once, {name}: wall", wall_s, "s"),
        Row(f"{count} requests at once, {name}: prompts", sum(map(len, prompts)), "tokens"),
        Row(f"{count} requests at once, {name}: output", sum(counts), "tokens"),
    ]
