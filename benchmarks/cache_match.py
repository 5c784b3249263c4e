"""What a turn costs the cache: hashing, match, leases and table, ends; and a decode step.

The parts of a turn follow each other as in an engine, after one turn that is not counted. Beside
them what match, leases and table take where everything else was touched just before, so that
nothing of them is in the processor's caches: some 0.2 ms more, however long the history.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable

from benchmarks.report import Options, Row, median_row
from sessionkv.cache.chain import TokenChain
from sessionkv.cache.manager import KVCacheManager
from sessionkv.types import BlockHash

ABOUT = "processor microseconds a block of 16 on the core thread, the history resident"
ROOT = BlockHash(b"benchmark".ljust(32, b"."))
BLOCK = 16
STEPS = 10_000


TURN = "match, leases and table"


def timed(work: Callable[[], object]) -> float:
    """Processor seconds of one call."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


class Bench:
    """A cache that holds a history of ``num_tokens`` and ten others as long."""

    def __init__(self, num_tokens: int) -> None:
        draw = random.Random(1)
        self.blocks = num_tokens // BLOCK
        self.kv = KVCacheManager(
            ROOT,
            block_size=BLOCK,
            num_device_blocks=12 * self.blocks,
            num_host_blocks=0,
            disk=False,
        )
        logs = [[draw.randrange(50_000) for _ in range(num_tokens)] for _ in range(11)]
        for number, log in enumerate(logs):
            self._turn(number, self._chain(log))
        self.log = logs[0]
        self.seq_id = 100

    def _chain(self, log: list[int]) -> TokenChain:
        return TokenChain(ROOT, BLOCK, tenant="local", token_ids=log)

    def _turn(self, seq_id: int, chain: TokenChain) -> None:
        match = self.kv.match(chain)
        self.kv.admit(seq_id, chain, match, room_tokens=len(chain))
        self.kv.commit(seq_id, len(chain))
        self.kv.finish(seq_id)

    def sample(self, *, is_cold: bool = False) -> dict[str, float]:
        """Microseconds a block of each part of one turn; a step for the last.

        ``is_cold`` has all objects of the process touched before the match.
        """
        self.seq_id += 1
        seq_id, kv = self.seq_id, self.kv
        hashes = self._chain(self.log).hashes
        chain = self._chain([])
        known = TokenChain(ROOT, BLOCK, tenant="local", token_ids=[*self.log, 1], hashes=hashes)
        matches = []
        spent = {"hash": timed(lambda: chain.extend(self.log))}
        if is_cold:
            gc.collect()
        spent["match"] = timed(lambda: matches.append(kv.match(known)))
        spent["leases and table"] = timed(lambda: kv.admit(seq_id, known, matches[0]))
        spent[TURN] = spent["match"] + spent["leases and table"]
        length = len(known)
        kv.reserve(seq_id, length)
        kv.commit(seq_id, length)
        known.extend([2] * (BLOCK - 2))

        def decode() -> None:
            for _ in range(STEPS):
                kv.reserve(seq_id, length)
                kv.stage(seq_id, length)
                kv.commit(seq_id, length)

        step = timed(decode) / STEPS
        spent["end"] = timed(lambda: kv.finish(seq_id))
        figures = {name: seconds / self.blocks * 1e6 for name, seconds in spent.items()}
        return {**figures, "decode step": step * 1e6}


def measure(options: Options) -> list[Row]:
    """All figures at two lengths of history."""
    rows = []
    for num_tokens in (10_000, 100_000):
        bench = Bench(num_tokens)
        gc.collect()
        gc.disable()
        try:
            bench.sample()
            samples = [bench.sample() for _ in range(options.repeats)]
            cold = [bench.sample(is_cold=True)[TURN] for _ in range(options.repeats)]
        finally:
            gc.enable()
        for name in samples[0]:
            unit = "us" if name == "decode step" else "us/block"
            bound = ("<=", 1.0) if name == TURN else None
            values = [sample[name] for sample in samples]
            rows.append(median_row(f"{name}, {num_tokens} tokens", values, unit, bound=bound))
        rows.append(median_row(f"{TURN}, {num_tokens} tokens, caches cold", cold, "us/block"))
    return rows
