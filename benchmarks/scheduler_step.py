"""Microseconds of the scheduler and the cache for one decode step, without the runner's own time.

Run with ``python -m benchmarks.scheduler_step``. Sequences decode side by side in blocks of
16; each step's schedule and commit are timed together, the runner is not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from sessionkv.cache.chain import TokenChain
from sessionkv.cache.identity import KVIdentity
from sessionkv.cache.manager import KVCacheManager
from sessionkv.config import SchedulerConfig
from sessionkv.engine.checksum_runner import ChecksumRunner
from sessionkv.engine.planner import LoadPlanner
from sessionkv.engine.scheduler.batch import StepBudget
from sessionkv.engine.scheduler.scheduler import Scheduler
from sessionkv.engine.scheduler.sequence import Sequence
from sessionkv.types import SamplingParams

BLOCK_SIZE = 16


def measure(num_sequences: int, context: int, steps: int) -> list[float]:
    """Seconds of each step, all sequences decoding."""
    length = context + steps + 1
    num_blocks = num_sequences * (length // BLOCK_SIZE + 2)
    runner = ChecksumRunner(num_blocks, BLOCK_SIZE, max_model_len=length, full_read=False)
    root = KVIdentity("benchmark", runner.geometry, "none", "1").root_hash()
    kv = KVCacheManager(
        root, block_size=BLOCK_SIZE, num_device_blocks=num_blocks, num_host_blocks=0, disk=False
    )
    scheduler = Scheduler(
        kv,
        LoadPlanner(block_size=BLOCK_SIZE),
        config=SchedulerConfig(),
        budget=StepBudget(alone=8192, shared=max(2048, num_sequences)),
        max_model_len=length,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=steps + 1)
    for seq_id in range(num_sequences):
        prompt = [(seq_id * 31 + i * 7) % 500 for i in range(context)]
        chain = TokenChain(root, BLOCK_SIZE, tenant="local", token_ids=prompt)
        scheduler.add(Sequence(seq_id, chain, sampling), 0.0)
    taken: list[float] = []
    while (started := time.perf_counter()) and (plan := scheduler.schedule(0.0)) is not None:
        planned = time.perf_counter()
        output = runner.execute(plan)
        computed = time.perf_counter()
        scheduler.commit(plan, output, 0.0)
        scheduler.take_transfers()
        if len(plan.steps) == num_sequences and not plan.starts:
            taken.append(planned - started + time.perf_counter() - computed)
    return taken


def main() -> None:
    """Print a table, and JSON with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--context", type=int, default=100)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    rows = []
    for count in (1, 8, 64, 256):
        taken = measure(count, args.context, args.steps)
        median = statistics.median(taken) * 1e6
        rows.append(
            {
                "sequences": count,
                "steps": len(taken),
                "step_us_p50": round(median, 1),
                "step_us_p99": round(sorted(taken)[len(taken) * 99 // 100] * 1e6, 1),
                "us_per_sequence": round(median / count, 2),
            }
        )
    if args.json:
        print(json.dumps(rows))
        return
    print(f"{'sequences':>9} {'p50 us':>9} {'p99 us':>9} {'us each':>8}")
    for row in rows:
        print(
            f"{row['sequences']:>9} {row['step_us_p50']:>9} {row['step_us_p99']:>9} "
            f"{row['us_per_sequence']:>8}"
        )


if __name__ == "__main__":
    main()
