"""Kill the engine with SIGKILL in mid-life; the conversation goes on, its KV read from disk.

python examples/restart.py [--model MODEL] [--store DIR]
"""

from __future__ import annotations

import argparse
import tempfile

from sessionkv import CacheReport, SamplingParams, launch

SAMPLING = SamplingParams(temperature=0.0, max_tokens=24)
SYSTEM = "You are the keeper of a lighthouse. Answer in one sentence."


def before(model: str, store: str) -> str:
    """One conversation, its blocks flushed to disk, and a death without warning."""
    with launch(model, store=store) as engine:
        client = engine.client()
        keeper = client.open("keeper", system=SYSTEM)
        keeper.turn("What did you see last night?", sampling=SAMPLING)
        reply = keeper.turn("And the night before?", sampling=SAMPLING)
        client.flush()
        engine.kill()
    return reply.text


def after(model: str, store: str) -> CacheReport:
    """The next turn, on a new engine over the same store."""
    with launch(model, store=store) as engine:
        keeper = engine.client().open("keeper")
        return keeper.turn("Will it be calm tonight?", sampling=SAMPLING).cache


def main() -> None:
    """Run both halves and say where the second prompt came from."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--store", help="directory to use (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        store = args.store or scratch
        print("before:", before(args.model, store))
        cache = after(args.model, store)
    print(
        f"after: {cache.prompt_tokens} prompt tokens = {cache.disk_tokens} from disk"
        f" + {cache.computed_tokens} computed; first token after {cache.ttft_ms:.0f} ms"
    )


if __name__ == "__main__":
    main()
