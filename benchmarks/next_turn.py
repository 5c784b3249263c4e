"""The next turn of a long conversation, and the cold prefill it saves."""

from __future__ import annotations

from benchmarks.engines import exactly, first_token_s, private_engine
from benchmarks.peer import TransformersPeer, random_tokens
from benchmarks.report import Options, Row, median_row, ratio_row

ABOUT = "TTFT of 45 new tokens after 2,000 resident ones, and of those 2,000 cold"
HISTORY_TOKENS = 2000
NEW_TOKENS = 45


def measure(options: Options) -> list[Row]:
    """Turn about, so that both sides see the same machine; new tokens differ in every sample."""
    peer = TransformersPeer(options)
    ours, ours_cold, theirs, theirs_cold = [], [], [], []
    with private_engine(options) as engine:
        client = engine.client()
        session = client.open("warm")
        session.turn(tokens=random_tokens(HISTORY_TOKENS, 0), sampling=exactly(1))
        for sample in range(-1, options.repeats):  # the first sample warms up
            history = random_tokens(HISTORY_TOKENS, 1000 + sample)
            new = random_tokens(NEW_TOKENS, 2000 + sample)
            cold = client.open(f"cold-{sample}")
            figures = [first_token_s(cold, history), first_token_s(session, new)]
            session.rewind(turns=1)
            cold.close(keep=False)
            peer.reset()
            figures.append(peer.first_token_s(history))
            figures.append(peer.first_token_s(new))
            if sample >= 0:
                for samples, figure in zip(
                    (ours_cold, ours, theirs_cold, theirs), figures, strict=True
                ):
                    samples.append(figure * 1000)
    warm, cold_row = median_row("next turn", ours, "ms"), median_row("cold 2,000", ours_cold, "ms")
    peer_warm = median_row("transformers, cache kept: next turn", theirs, "ms")
    peer_cold = median_row("transformers: cold 2,000", theirs_cold, "ms")
    return [
        warm,
        peer_warm,
        ratio_row("next turn / transformers' next turn", warm, peer_warm, bound=("<=", 0.8)),
        cold_row,
        peer_cold,
        ratio_row("next turn / our cold", warm, cold_row, bound=("<=", 0.08)),
        ratio_row("cold / transformers' cold", cold_row, peer_cold, bound=("<=", 1.0)),
    ]
