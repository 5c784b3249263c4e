"""More conversations than the device has room for: none waits for another, none is lost.

    python examples/many_sessions.py [--model MODEL] [--sessions N] [--turns N]

Shows from which tier the prompts came. Cold conversations move to host memory and on to disk, and
come back when they are spoken to again.
"""

from __future__ import annotations

import argparse
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from sessionkv import CacheConfig, Client, EngineConfig, SamplingParams, launch

CONCURRENCY = 4
TOPICS = ("rivers", "bridges", "clocks", "maps", "bees", "salt", "paper", "glass", "tides", "kites")
CONFIG = EngineConfig(
    max_model_len=512,
    cache=CacheConfig(device_blocks=64, host_bytes=16 * 2**20, disk_bytes=512 * 2**20),
)


def converse(client: Client, *, sessions: int, turns: int) -> list[Counter[str]]:
    """Speak to all sessions in rounds; what each round's prompts were made of, in tokens."""
    sampling = SamplingParams(temperature=0.0, max_tokens=16)
    names = [f"{TOPICS[i % len(TOPICS)]}-{i}" for i in range(sessions)]

    def one_turn(name: str, number: int) -> Counter[str]:
        session = client.open(name, system=f"You know everything about {name}.")
        cache = session.turn(f"Tell me fact number {number + 1}.", sampling=sampling).cache
        return Counter(
            device=cache.device_tokens,
            host=cache.host_tokens,
            disk=cache.disk_tokens,
            computed=cache.computed_tokens,
        )

    rounds = []
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        for number in range(turns):
            tasks = [pool.submit(one_turn, name, number) for name in names]
            rounds.append(sum((task.result() for task in tasks), Counter()))
    return rounds


def main() -> None:
    """Run on a private engine with a small cache and print one line a round."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    with launch(args.model, config=CONFIG) as engine:
        rounds = converse(engine.client(), sessions=args.sessions, turns=args.turns)
    for number, tokens in enumerate(rounds, start=1):
        places = ", ".join(
            f"{tokens[place]:,} {place}" for place in ("device", "host", "disk", "computed")
        )
        print(f"round {number}: {sum(tokens.values()):,} prompt tokens = {places}")


if __name__ == "__main__":
    main()
