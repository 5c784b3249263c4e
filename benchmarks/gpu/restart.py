"""After kill -9: next turns whose history is on disk only, against loading or computing it all.

The engine that comes after has no host tier and a device with room for one long history, so each
visit pushes the ones before it off the device, and the next visit to them is to the disk again.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.driver import Trace
from benchmarks.gpu.engine import Bench, running
from benchmarks.gpu.tiers import make_histories, visit
from benchmarks.report import Row, median_row
from benchmarks.store.shapes import forget_pages
from sessionkv.config import CacheConfig

COPIES = 2
"""Histories of each length."""
STATES = ("warm pages", "cold pages")
Names = Mapping[int, Sequence[str]]


def after_kill(bench: Bench, *, store: Path) -> list[Row]:
    """Write histories to disk, kill the engine, start another and visit them there.

    Args:
        bench: An engine on ``store``; it is gone afterwards.
        store: Its directory.
    """
    scale = bench.scale
    names = {
        history: [session.name for session in make_histories(bench, history, COPIES)]
        for history in sorted(scale.histories, reverse=True)
    }
    print(f"  flushed: {bench.client.flush()}", flush=True)
    bench.process.kill()
    window = max(scale.histories) + 2 * scale.new + 2
    with running(
        bench.setting,
        bench.name,
        store=store,
        max_model_len=window,
        device_blocks=-(-window // CacheConfig().block_size) + 1,
        host_bytes=0,
        disk_bytes=scale.disk_bytes,
        durability="off",
    ) as after:
        return _visits(after, names, store)


def _visits(bench: Bench, names: Names, store: Path) -> list[Row]:
    longest = max(names)
    # Nothing was computed yet, so there is nothing to weigh against loading.
    first = visit(bench, bench.client.session(names[longest][0]), "first")
    rows = [
        Row(f"{_name(bench, longest)}: first after the start, all loaded", first.ttft_ms, "ms"),
        Row(f"{_name(bench, longest)}: its share loaded", first.cache.disk_tokens / longest, "x"),
    ]
    computed = {history: _computed_ms(bench, history) for history in names}
    for history, row in computed.items():
        rows.append(row)
        print(f"  {history:,} computed: {row.value:.0f} ms", flush=True)
    for state in STATES:
        traces: dict[int, list[Trace]] = {history: [] for history in names}
        before = bench.moved().get("disk_to_device", (0, 0.0))
        for number in range(bench.scale.few * COPIES):
            for history, found in names.items():
                if state == "cold pages":
                    forget_pages(store)
                session = bench.client.session(found[number % COPIES])
                traces[history].append(visit(bench, session, state, number))
            if bench.setting.time_is_up:
                break
        moved, busy_s = bench.moved().get("disk_to_device", (0, 0.0))
        rate = (moved - before[0]) / max(busy_s - before[1], 1e-9)
        rows.append(Row(f"disk to device, {state}", rate / 1e9, "GB/s"))
        for history in names:
            rows += _against_both(bench, history, state, traces[history], computed[history], rate)
    return rows


def _name(bench: Bench, history: int) -> str:
    return f"next turn of {bench.scale.new}, {history:,} on disk"


def _computed_ms(bench: Bench, history: int) -> Row:
    """The same prompt without a cache."""

    def one(sample: int) -> float:
        tokens = bench.tokens(history + bench.scale.new, "computed", history, sample)
        return bench.ask(tokens, cache=False).ttft_ms

    samples = bench.repeat(bench.scale.few, one)
    return median_row(f"{_name(bench, history)}: all computed", samples, "ms")


def _against_both(
    bench: Bench,
    history: int,
    state: str,
    traces: Sequence[Trace],
    computed: Row,
    bytes_per_s: float,
) -> list[Row]:
    """What was found, with loading all at the rate seen; at most a little above the better one."""
    name = f"{_name(bench, history)}, {state}"
    rows = []
    limit = computed.value
    if bytes_per_s > 0:
        resident = bench.setting.known.get(f"next turn of {bench.scale.new}, {history:,} resident")
        rest_ms = min(t.cache.prefill_ms for t in traces) if resident is None else resident.value
        load_ms = 1000.0 * history * bench.shape.kv_bytes / bytes_per_s + rest_ms
        rows.append(Row(f"{name}: all loaded, by the rate", load_ms, "ms"))
        limit = min(limit, load_ms)
    samples = [t.ttft_ms for t in traces]
    bar = bench.bar("<=", 1.05 * limit + 3.0)
    ratio = statistics.median(samples) / limit
    shares = [min(1.0, t.cache.disk_tokens / history) for t in traces]
    return [
        *rows,
        median_row(name, samples, "ms", bound=bar),
        Row(f"{name}: of the better of both", ratio, "x", len(samples)),
        median_row(f"{name}: share loaded", shares, "x"),
    ]
