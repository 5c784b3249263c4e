"""The whole thing in two minutes: talk, fork, pressure, kill -9, restart, go on.

    make demo
    python examples/demo.py [--model MODEL]

The cache is made small on purpose, so that a handful of conversations fills device and host.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from sessionkv import (
    CacheConfig,
    CacheReport,
    Client,
    EngineConfig,
    EngineProcess,
    SamplingParams,
    launch,
)
from sessionkv.client import Session

SYSTEM = "You are a friendly guide to a small harbour town. Answer in one or two short sentences."
OPENING = (
    "What is the town called, and what is it known for?",
    "Where should I eat?",
    "What can I do there when it rains?",
)
GUESTS = ("baker", "pilot", "gardener", "diver", "smith", "weaver", "judge", "clown")
NEWS = (
    "Good morning! I have just arrived on the early ferry, the sun is out, the market is setting "
    "up its stalls, somebody plays the accordion by the fountain, and the smell of fresh bread "
    "comes all the way down to the quay. I have one day, two good shoes and no plan at all. My "
    "grandmother was born here, in the yellow house behind the church, and she told me that you "
    "know everybody and everything. What should I not miss, and what should I stay away from?"
)
REPLY_TOKENS = 32
CONFIG = EngineConfig(
    max_model_len=512,
    cache=CacheConfig(device_blocks=32, host_bytes=12 * 2**20),  # 512 tokens, and half as many
)
CONSOLE = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Line:
    """One row of the summary."""

    stage: str
    session: str
    cache: CacheReport


class Demo:
    """Holds what every act needs: the engine's settings, where it keeps things, the summary."""

    def __init__(self, model: str, store: str, *, config: EngineConfig = CONFIG) -> None:
        self.model = model
        self.store = store
        self.config = config
        self.lines: list[Line] = []
        self.sampling = SamplingParams(temperature=0.0, max_tokens=REPLY_TOKENS)

    def start(self) -> EngineProcess:
        """Start the engine on the demo's store, with a bar for whatever takes time."""
        start = time.perf_counter()
        with Progress(console=CONSOLE, transient=True) as progress:
            bars: dict[str, TaskID] = {}

            def show(event: Mapping[str, Any]) -> None:
                stage = str(event["stage"])
                if stage not in bars:
                    bars[stage] = progress.add_task(stage, total=None)
                progress.update(bars[stage], completed=event["done"], total=event["total"])

            engine = launch(self.model, store=self.store, config=self.config, on_progress=show)
        seconds = time.perf_counter() - start
        CONSOLE.print(f"engine {engine.pid} is ready after {seconds:.1f} s", style="dim")
        return engine

    def turn(self, session: Session, text: str, *, stage: str) -> None:
        """One turn, its reply as it comes, and where its prompt came from."""
        said = Text.assemble((session.name, "bold cyan"), (f"  {shortened(text)}", "bold"))
        CONSOLE.print("\n", said, sep="")
        for event in session.stream(text, sampling=self.sampling):
            CONSOLE.print(Text(event.text), end="")
            if event.result is not None:
                CONSOLE.print(Text(f"\n  {event.result.cache}", "dim"))
                self.lines.append(Line(stage, session.name, event.result.cache))


def shortened(text: str) -> str:
    """What is sent, cut to a line."""
    return text if len(text) <= 70 else text[:67] + "..."


def heading(text: str) -> None:
    """Name the act that begins."""
    CONSOLE.print()
    CONSOLE.rule(Text(text, "bold"), align="left")


def first_life(demo: Demo, engine: EngineProcess) -> None:
    """Talk, fork, then more conversations than fit; at the end everything is flushed to disk."""
    client = engine.client()
    heading("1. A conversation: every turn sends only what is new")
    guide = client.open("guide", system=SYSTEM)
    for text in OPENING:
        demo.turn(guide, text, stage="talk")

    heading("2. A fork: the same past under another name, no KV copied")
    branch = guide.fork("guide-b")
    demo.turn(branch, "And what if it snows?", stage="fork")

    cache = demo.config.cache
    room = (cache.device_blocks or 0) * cache.block_size
    heading(f"3. Pressure: {len(GUESTS)} more conversations, room for {room} tokens on the device")
    for trade in GUESTS:
        guest = client.open(trade, system=f"You are the {trade} of a small harbour town.")
        demo.turn(guest, NEWS, stage="pressure")
    show_tiers(client)

    heading("4. Cold conversations again: their blocks come back from the tiers below")
    demo.turn(client.open(GUESTS[-4]), "Thank you!", stage="back")
    demo.turn(guide, "Is there a museum?", stage="back")
    client.flush()


def second_life(demo: Demo, engine: EngineProcess) -> None:
    """A new engine over the same store goes on where the old one was killed."""
    heading("6. The same conversation, on a new engine: its past is read from disk")
    guide = engine.client().open("guide")
    demo.turn(guide, "Thank you. What was the first thing I asked you?", stage="restart")
    demo.turn(guide, "And the second?", stage="restart")


def show_tiers(client: Client) -> None:
    """How full each tier is now."""
    tiers = client.stats()["kv"]
    places = ", ".join(
        f"{tiers[tier]['used_bytes'] / 2**20:.1f} MiB in {tier}"
        for tier in ("device", "host", "disk")
    )
    CONSOLE.print(Text(f"\n  KV of all conversations: {places}", "dim"))


def summary(lines: list[Line]) -> Table:
    """All turns, one row each."""
    table = Table(
        title="Where each prompt came from, in tokens", title_justify="left", box=None,
        padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip
    for column in ("act", "session"):
        table.add_column(column)
    for column in ("prompt", "device", "host", "disk", "computed", "TTFT ms", "tok/s"):
        table.add_column(column, justify="right")
    table.add_column("miss")
    for line in lines:
        cache = line.cache
        counts = (
            cache.prompt_tokens, cache.device_tokens, cache.host_tokens, cache.disk_tokens,
            cache.computed_tokens,
        )  # fmt: skip
        rates = (f"{cache.ttft_ms:.0f}", f"{cache.decode_tokens_per_s:.1f}")
        miss = cache.miss.reason.value
        table.add_row(line.stage, line.session, *map(str, counts), *rates, miss)
    return table


def play(demo: Demo) -> None:
    """All acts, in order."""
    with demo.start() as engine:
        first_life(demo, engine)
        heading("5. kill -9")
        engine.kill()
        CONSOLE.print(f"engine {engine.pid} is dead; starting another on its store")
    with demo.start() as engine:
        second_life(demo, engine)
    CONSOLE.print()
    CONSOLE.print(summary(demo.lines))


def main() -> None:
    """Run on a store that is removed at the end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sessionkv-demo-") as store:
        play(Demo(args.model, store))


if __name__ == "__main__":
    main()
