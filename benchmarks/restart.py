"""After SIGKILL and restart: the next turn of a long conversation against computing it all."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.engines import exactly, first_token_s, private_engine
from benchmarks.peer import random_tokens
from benchmarks.report import Options, Row, median_row, ratio_row

ABOUT = "TTFT of the next turn of a 2,000-token conversation after kill -9, from ready"
HISTORY_TOKENS = 2000
NEW_TOKENS = 45


def measure(options: Options) -> list[Row]:
    """Each sample kills an engine and starts the next one on its store."""
    cold, restarted = [], []
    with tempfile.TemporaryDirectory(prefix="sessionkv-bench-") as folder:
        store = Path(folder)
        with private_engine(options, store=store) as engine:
            client = engine.client()
            client.open("long").turn(tokens=random_tokens(HISTORY_TOKENS, 0), sampling=exactly(1))
            for sample in range(options.repeats):
                other = client.open(f"cold-{sample}")
                tokens = random_tokens(HISTORY_TOKENS + NEW_TOKENS, 1 + sample)
                cold.append(first_token_s(other, tokens) * 1000)
                other.close(keep=False)
            client.flush()
            engine.kill()
        for sample in range(options.repeats):
            with private_engine(options, store=store) as engine:
                session = engine.client().open("long")
                tokens = random_tokens(NEW_TOKENS, 100 + sample)
                restarted.append(first_token_s(session, tokens) * 1000)
                session.rewind(turns=1)
                engine.kill()
    cold_row = median_row("cold", cold, "ms")
    row = median_row("after restart, from disk", restarted, "ms")
    return [row, cold_row, ratio_row("restart / cold", row, cold_row, bound=("<=", 0.2))]
