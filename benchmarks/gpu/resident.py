"""Cases of an engine whose device holds everything: decoding, first tokens, prompts, next turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

from benchmarks.gpu.driver import Ask, decode_rate
from benchmarks.gpu.engine import Bench
from benchmarks.gpu.setting import Scale
from benchmarks.report import Row, median_row, ratio_row

Case = Callable[[Bench], list[Row]]

ALONE_BARS = {1024: 193.0, 32768: 158.0}
BATCH_BARS = {(64, 2048): 6254.0, (256, 1024): 13221.0}
COLD_BARS_MS = {2048: 1.05 * 52, 8192: 1.05 * 219, 32768: 1.05 * 1253}
NEXT_BARS_MS = {8192: 16.0, 32768: 25.0}
SHARED_BARS = {512: (0.40, 0.55), 2048: (0.15, 0.35)}
"""Of the mean time to the first token without cache: with a warm one, and all cold at once."""
REQUESTS = 8


def decode_cases(scale: Scale) -> dict[str, Case]:
    """By name: one stream, and many."""
    cases: dict[str, Case] = {
        f"decode-1-at-{context}": partial(decode_alone, context=context) for context in scale.alone
    }
    for batch, context in scale.batches:
        cases[f"decode-{batch}-at-{context}"] = partial(decode_batch, batch=batch, context=context)
    return cases


def resident_cases(scale: Scale) -> dict[str, Case]:
    """By name, what matters first at the front."""
    cases = decode_cases(scale) | {"first-token": first_token}
    for length, count in scale.cold:
        cases[f"cold-{length}"] = partial(cold_prompt, length=length, count=count)
    for history in scale.histories:
        cases[f"next-turn-{history}"] = partial(next_turn, history=history)
    for prefix in scale.shared:
        cases[f"shared-{prefix}"] = partial(shared_prefix, prefix=prefix)
    return cases | {"nothing-shared": nothing_shared}


def decode_alone(bench: Bench, *, context: int) -> list[Row]:
    """Tokens a second of one stream from a context on."""
    scale = bench.scale

    def rate(sample: int) -> float:
        count = scale.decoded if sample >= 0 else 5
        return decode_rate([bench.ask(bench.tokens(context, "alone", context, sample), count)])

    bar = bench.bar(">=", ALONE_BARS.get(context, 0.0))
    rates = bench.repeat(scale.few, rate)
    return [median_row(f"decode, one stream at {context:,}", rates, "tok/s", bound=bar)]


def decode_batch(bench: Bench, *, batch: int, context: int) -> list[Row]:
    """Tokens a second of many streams while all of them decode, and the prompts before."""
    scale = bench.scale
    name = f"{batch} at {context:,}"
    prompts: list[float] = []

    def rate(sample: int) -> float:
        size, length, count = batch, context, scale.decoded
        if sample < 0:  # kernels, not lengths, have to be warm
            size, length, count = min(batch, 8), context // 4, 9
        asks = [Ask(bench.tokens(length, "batch", batch, sample, i), count) for i in range(size)]
        traces = bench.together(asks)
        spent_s = max(t.first_s for t in traces) - min(t.sent_s for t in traces)
        prompts.append(size * length / spent_s)
        return decode_rate(traces)

    bar = bench.bar(">=", BATCH_BARS.get((batch, context), 0.0))
    rates = bench.repeat(2, rate)
    return [
        median_row(f"decode, {name}", rates, "tok/s", bound=bar),
        median_row(f"prompts before, {name}", prompts[1:], "tok/s"),
    ]


def first_token(bench: Bench) -> list[Row]:
    """Of a short prompt, alone."""
    scale = bench.scale

    def one(sample: int) -> float:
        return bench.ask(bench.tokens(scale.short, "first", sample)).ttft_ms

    bar = bench.bar("<=", 12.0)
    samples = bench.repeat(2 * scale.samples, one)
    return [median_row(f"first token, prompt of {scale.short}", samples, "ms", bound=bar)]


def cold_prompt(bench: Bench, *, length: int, count: int) -> list[Row]:
    """First token of a prompt that nothing is known of, and core's share of that time."""

    def one(sample: int) -> tuple[float, float]:
        trace = bench.ask(bench.tokens(length, "cold", length, sample))
        if trace.cache.cached_tokens > length // 8:  # first tokens may be alike by chance
            raise RuntimeError(f"{trace.cache.cached_tokens} tokens of a new prompt were cached")
        return trace.ttft_ms, trace.cache.prefill_ms

    bar = bench.bar("<=", COLD_BARS_MS.get(length, 0.0))
    first, computing = zip(*bench.repeat(count, one), strict=True)
    name = f"cold prompt of {length:,}"
    return [
        median_row(name, first, "ms", bound=bar),
        median_row(f"{name}: from admission on", computing, "ms"),
    ]


def next_turn(bench: Bench, *, history: int) -> list[Row]:
    """First token of a turn of a session whose history is on the device."""
    scale = bench.scale
    session = bench.open("next")
    bench.ask(bench.tokens(history, "history", history), session=session.name)

    def one(sample: int) -> float:
        trace = bench.ask(bench.tokens(scale.new, session.name, sample), session=session.name)
        session.rewind(turns=1)
        if trace.cache.device_tokens < history:
            raise RuntimeError(f"not all of the history was on the device: {trace.cache}")
        return trace.ttft_ms

    samples = bench.repeat(scale.samples, one)
    session.close(keep=False)
    bar = bench.bar("<=", NEXT_BARS_MS.get(history, 0.0))
    return [median_row(f"next turn of {scale.new}, {history:,} resident", samples, "ms", bound=bar)]


def _mean_ttft_ms(bench: Bench, prefix: list[int], *seed: object, cache: bool = True) -> float:
    asks = [
        Ask(prefix + bench.tokens(bench.scale.own, *seed, i), 4, cache=cache)
        for i in range(REQUESTS)
    ]
    return statistics.mean(trace.ttft_ms for trace in bench.together(asks))


def shared_prefix(bench: Bench, *, prefix: int) -> list[Row]:
    """Mean time to the first token of requests at once that share a prefix."""

    def one(sample: int) -> tuple[float, float, float]:
        shared = bench.tokens(prefix, "shared", prefix, sample)
        cold = _mean_ttft_ms(bench, shared, "cold", prefix, sample)
        warm = _mean_ttft_ms(bench, shared, "warm", prefix, sample)
        return cold, warm, _mean_ttft_ms(bench, shared, "off", prefix, sample, cache=False)

    samples = bench.repeat(bench.scale.samples // 2, one)
    name = f"{REQUESTS} sharing {prefix:,}"
    cold, warm, off = (
        median_row(f"{name}, {kind}", [sample[i] for sample in samples], "ms")
        for i, kind in enumerate(("all cold at once", "warm", "cache off"))
    )
    bars = SHARED_BARS.get(prefix, (0.0, 0.0))
    return [
        off,
        cold,
        warm,
        ratio_row(f"{name}, warm / off", warm, off, bound=bench.bar("<=", bars[0])),
        ratio_row(f"{name}, cold at once / off", cold, off, bound=bench.bar("<=", bars[1])),
    ]


def nothing_shared(bench: Bench) -> list[Row]:
    """What looking for prefixes costs requests at once that have none in common."""
    length = max(bench.scale.shared)

    def one(sample: int) -> tuple[float, float]:
        found = []
        for cache in (True, False):
            asks = [
                Ask(bench.tokens(length, "apart", sample, cache, i), 4, cache=cache)
                for i in range(REQUESTS)
            ]
            found.append(statistics.mean(trace.ttft_ms for trace in bench.together(asks)))
        return found[0], found[1]

    samples = bench.repeat(bench.scale.samples // 2, one)
    on, off = (
        median_row(f"{REQUESTS} sharing nothing, {kind}", [sample[i] for sample in samples], "ms")
        for i, kind in enumerate(("cache on", "cache off"))
    )
    bar = bench.bar("<=", 1.01)
    return [on, off, ratio_row(f"{REQUESTS} sharing nothing, on / off", on, off, bound=bar)]
