"""The smallest chat: a session by name, replies as they come, where each prompt came from.

    python examples/chat.py [--model MODEL] [--session NAME] [--store DIR]

Run it twice with one ``--store``: the second run goes on where the first one ended.
"""

from __future__ import annotations

import argparse
import sys

from sessionkv import Client, SamplingParams, launch


def chat(client: Client, name: str) -> None:
    """Answer every line of standard input, until it ends."""
    session = client.open(name, system="You are a helpful assistant. Be brief.")
    sampling = SamplingParams(temperature=0.0, max_tokens=128)
    for line in sys.stdin:
        if not line.strip():
            continue
        for event in session.stream(line.strip(), sampling=sampling):
            print(event.text, end="", flush=True)
            if event.result is not None:
                cache = event.result.cache
                print(f"\n  [{cache.cached_tokens} of {cache.prompt_tokens} tokens were cached]")
    session.close(keep=True)


def main() -> None:
    """Start a private engine and chat with it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--session", default="chat")
    parser.add_argument("--store", help="keep conversations here (default: nowhere)")
    args = parser.parse_args()
    with launch(args.model, store=args.store) as engine:
        chat(engine.client(), args.session)


if __name__ == "__main__":
    main()
