"""What a block size costs and saves: speed, how much of histories is found, memory without use."""

from __future__ import annotations

import random

from benchmarks.gpu.driver import Ask, decode_rate
from benchmarks.gpu.engine import Bench, running
from benchmarks.gpu.setting import Setting
from benchmarks.report import Row

SIZES = (8, 16, 32, 64, 128)
TALKS = 16
TURNS = 3


def block_size_rows(setting: Setting, size: int) -> list[Row]:
    """One engine of that block size."""
    with running(setting, setting.model, block_size=size, host_bytes=0, disk_bytes=0) as bench:
        return [*_speed(bench, size), *_conversations(bench, size)]


def _speed(bench: Bench, size: int) -> list[Row]:
    batch, context = bench.scale.batches[0]
    length = bench.scale.cold[1][0]
    bench.together([Ask(bench.tokens(context // 4, "warm", i), 9) for i in range(min(batch, 8))])
    asks = [Ask(bench.tokens(context, i), bench.scale.decoded) for i in range(batch)]
    rate = decode_rate(bench.together(asks))
    prompts = bench.repeat(3, lambda n: length / bench.ask(bench.tokens(length, "p", n)).ttft_ms)
    return [
        Row(f"blocks of {size}: decode, {batch} at {context:,}", rate, "tok/s"),
        Row(f"blocks of {size}: prompt of {length:,}", 1000.0 * max(prompts), "tok/s", 3),
    ]


def _conversations(bench: Bench, size: int) -> list[Row]:
    """Conversations that begin alike and add some tokens a turn: found, and wasted meanwhile."""
    source = random.Random(5)
    longest = max(bench.scale.shared)
    shared = bench.tokens(longest + 5, "begin")
    sessions = [bench.open(f"talk-{i}") for i in range(TALKS)]
    before = bench.client.stats()
    for turn in range(TURNS):
        asks = []
        for i, session in enumerate(sessions):
            own = bench.tokens(source.randint(8, longest // 3), "own", turn, i)
            asks.append(Ask((shared if turn == 0 else []) + own, 4, session=session.name))
        if turn == 0:
            bench.together(asks[:1])
            asks = asks[1:]
        bench.together(asks)
    after = bench.client.stats()
    found, asked = (
        after["prefix_cache"][key] - before["prefix_cache"][key]
        for key in ("hits_tokens", "queries_tokens")
    )
    wasted, used = (
        after["kv"]["device"][key] - before["kv"]["device"][key]
        for key in ("wasted_bytes", "used_bytes")
    )
    for session in sessions:
        session.close(keep=False)
    return [
        Row(f"blocks of {size}: prompt tokens found", found / asked, "x"),
        Row(f"blocks of {size}: memory without a token", wasted / used, "x"),
    ]
