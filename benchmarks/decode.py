"""Decoding: one stream at two lengths against transformers, and eight streams together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.engines import event_times, exactly, private_engine
from benchmarks.peer import TransformersPeer, random_tokens
from benchmarks.report import Options, Row, median_row, ratio_row

ABOUT = "tokens a second at contexts of 200 and 2,000, and of 8 conversations at 200"
DECODED = 64
STREAMS = 8


def _stream_rate(client: Any, name: str, context: int, seed: int) -> float:
    session = client.open(name)
    times = event_times(
        session.stream(tokens=random_tokens(context, seed), sampling=exactly(DECODED))
    )
    session.close(keep=False)
    return (DECODED - 1) / (times[-1] - times[0])


def _together_rate(client: Any, seed: int) -> float:
    """All streams' tokens over the time in which all of them decode."""
    sessions = [client.open(f"t-{seed}-{i}") for i in range(STREAMS)]

    def one(index: int) -> list[float]:
        tokens = random_tokens(200, seed * STREAMS + index)
        return event_times(sessions[index].stream(tokens=tokens, sampling=exactly(DECODED)))

    with ThreadPoolExecutor(STREAMS) as pool:
        times = list(pool.map(one, range(STREAMS)))
    for session in sessions:
        session.close(keep=False)
    start, end = max(t[0] for t in times), min(t[-1] for t in times)
    return sum(sum(start < at <= end for at in t) for t in times) / (end - start)


def measure(options: Options) -> list[Row]:
    """Turn about; the first sample warms up."""
    peer = TransformersPeer(options)
    ours: dict[int, list[float]] = {200: [], 2000: []}
    theirs: dict[int, list[float]] = {200: [], 2000: []}
    together = []
    with private_engine(options) as engine:
        client = engine.client()
        for sample in range(-1, options.repeats):
            for context in ours:
                seed = context + sample
                rate = _stream_rate(client, f"s-{context}-{sample}", context, seed)
                peer.reset()
                peer_rate = peer.decode_rate(peer.feed(random_tokens(context, seed)), DECODED - 1)
                if sample >= 0:
                    ours[context].append(rate)
                    theirs[context].append(peer_rate)
            rate = _together_rate(client, 100 + sample)
            if sample >= 0:
                together.append(rate)
    rows = []
    for context, limit in ((200, 1.5), (2000, 1.3)):
        row = median_row(f"one stream at {context:,}", ours[context], "tok/s")
        peer_row = median_row(f"transformers at {context:,}", theirs[context], "tok/s")
        rows += [row, peer_row]
        rows.append(ratio_row(f"ratio at {context:,}", row, peer_row, bound=(">=", limit)))
    eight = median_row(f"{STREAMS} streams at 200", together, "tok/s")
    rows += [eight, ratio_row(f"{STREAMS} streams / one", eight, rows[0], bound=(">=", 3.0))]
    return rows
