"""Which blocks are kept while tools run: learned waits against plain order of use, on one trace.

Sessions of agents, whose turns mostly end in a tool call, and of people, over a device that holds
half of what these have; and passers-by, who ask once and never come back. Time is the trace's own;
the real cache manager decides, and no byte is moved. A hit is a token of the known history that was
found on the device.

    python -m benchmarks.store.retention [--sessions 60] [--turns 3000] [--seeds 5]
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from sessionkv.cache.chain import TokenChain
from sessionkv.cache.expected import ExpectedReturns
from sessionkv.cache.manager import KVCacheManager
from sessionkv.cache.retention import Retention
from sessionkv.types import BlockHash, Tier

ROOT = BlockHash(bytes(32))
BLOCK_SIZE = 16
TOOL_SHARE = 0.8
"""Turns of agents that end in a tool call."""
TOOL_S, TOOL_SIGMA = 45.0, 0.7
PERSON_S, PERSON_SIGMA = 240.0, 1.0
"""Medians and spreads of the log-normal gaps before the next turn."""
PASSERS_S = 2.0
"""A passer-by comes so often, for each 20 sessions."""
FIRST_TOKENS, TURN_TOKENS = (200, 1200), (16, 160)
TURNS_A_SESSION = 40


@dataclass(slots=True)
class Conversation:
    """One session of the trace."""

    name: str
    is_agent: bool
    chain: TokenChain
    written: int = 0
    turns_left: int = 0
    is_passing: bool = False
    owned: list[BlockHash] = field(default_factory=list)


@dataclass(slots=True)
class Counts:
    """Tokens of known history, and how many of them were there."""

    known: int = 0
    hit: int = 0

    @property
    def rate(self) -> float:
        """Share that was there."""
        return self.hit / self.known if self.known else 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """Hit rates of one policy on one trace."""

    all: float
    agents: float
    people: float


class Trace:
    """Replays one seeded trace over a device of ``num_blocks``."""

    def __init__(self, seed: int, num_sessions: int, num_blocks: int, *, learned: bool) -> None:
        self._random = random.Random(seed)
        caps = {Tier.DEVICE: num_blocks}
        self.retention = Retention(block_bytes=1, caps=caps)
        self.returns = ExpectedReturns(self.retention, max_blocks=num_blocks // 2)
        self._learned = learned
        self.kv = KVCacheManager(
            ROOT, block_size=BLOCK_SIZE, num_device_blocks=num_blocks, num_host_blocks=0,
            disk=False, retention=self.retention,
        )  # fmt: skip
        self._next = 0
        self._due: list[tuple[float, int, Conversation]] = []
        self.counts = {True: Counts(), False: Counts()}
        self._passers_s = PASSERS_S * 20 / num_sessions
        for _ in range(num_sessions):
            self._begin(self._random.uniform(0, 2 * PERSON_S), self._random.random())
        self._pass_by(0.0)

    def run(self, num_turns: int) -> Result:
        """Replay; the first quarter only warms up."""
        for turn in range(num_turns):
            if turn == num_turns // 4:
                self.counts = {True: Counts(), False: Counts()}
            now, _, conversation = heapq.heappop(self._due)
            self._turn(conversation, now)
        total = Counts(
            sum(c.known for c in self.counts.values()), sum(c.hit for c in self.counts.values())
        )
        return Result(total.rate, self.counts[True].rate, self.counts[False].rate)

    def _tokens(self, bounds: tuple[int, int]) -> list[int]:
        count = self._random.randint(*bounds)
        return [self._random.randrange(50_000) for _ in range(count)]

    def _begin(self, at_s: float, age: float = 0.0) -> None:
        self._next += 1
        tokens = self._tokens(FIRST_TOKENS)
        chain = TokenChain(ROOT, BLOCK_SIZE, tenant="local", token_ids=tokens)
        new = Conversation(str(self._next), self._next % 2 == 0, chain)
        new.turns_left = max(1, int(TURNS_A_SESSION * (1 - age)))
        heapq.heappush(self._due, (at_s, self._next, new))

    def _pass_by(self, at_s: float) -> None:
        self._next += 1
        tokens = self._tokens(FIRST_TOKENS)
        chain = TokenChain(ROOT, BLOCK_SIZE, tenant="local", token_ids=tokens)
        passer = Conversation(str(self._next), False, chain, turns_left=1, is_passing=True)
        heapq.heappush(self._due, (at_s, self._next, passer))

    def _turn(self, session: Conversation, now: float) -> None:
        head = ("local", session.name)
        if self._learned:
            self.returns.expire(now)
            self.returns.turn_began(head, now)
        self._compute(session)
        if session.is_passing:  # nobody deletes what they leave behind
            self._pass_by(now + self._random.expovariate(1 / self._passers_s))
            return
        session.turns_left -= 1
        if session.turns_left == 0:
            self.returns.forget(head)
            self.retention.disown(session.owned)
            self._begin(now + self._gap(PERSON_S, PERSON_SIGMA))
            return
        calls = session.is_agent and self._random.random() < TOOL_SHARE
        if self._learned and calls:
            tail = session.chain.tail_record(session.written)
            hashes = list(session.chain.hashes)
            self.returns.called(head, hashes, None if tail is None else tail.key, now)
        elif self._learned:
            self.returns.forget(head)
        gap_s = self._gap(TOOL_S, TOOL_SIGMA) if calls else self._gap(PERSON_S, PERSON_SIGMA)
        session.chain.extend(self._tokens(TURN_TOKENS))
        self._next += 1
        heapq.heappush(self._due, (now + gap_s, self._next, session))

    def _gap(self, median_s: float, sigma: float) -> float:
        return median_s * self._random.lognormvariate(0.0, sigma)

    def _compute(self, session: Conversation) -> None:
        """One turn: match, admit, compute, keep."""
        chain, kv = session.chain, self.kv
        seq_id = self._next
        admission = kv.admit(seq_id, chain, kv.match(chain), room_tokens=len(chain))
        if admission is None:
            raise SystemExit("a turn does not fit the device")
        counts = self.counts[session.is_agent]
        counts.known += session.written
        counts.hit += min(admission.device_tokens, session.written)
        kv.stage(seq_id, len(chain))
        kv.commit(seq_id, len(chain))
        kv.unstage()
        kv.finish(seq_id)
        kv.plan_transfers()
        session.written = len(chain)
        new = chain.hashes[len(session.owned) :]
        session.owned += new
        self.retention.own(new)


def working_set_blocks(num_sessions: int) -> int:
    """Blocks that all sessions have, on average."""
    first, turn = (sum(bounds) / 2 for bounds in (FIRST_TOKENS, TURN_TOKENS))
    return int(num_sessions * (first + turn * TURNS_A_SESSION / 2) / BLOCK_SIZE)


def run(
    *, num_sessions: int = 60, num_turns: int = 3000, seed: int = 1, oversubscription: float = 2.0
) -> dict[str, Result]:
    """Both policies on one trace, whose device holds a part of the working set.

    Returns:
        ``{"lru": ..., "learned": ...}``.
    """
    num_blocks = int(working_set_blocks(num_sessions) / oversubscription)
    return {
        name: Trace(seed, num_sessions, num_blocks, learned=name == "learned").run(num_turns)
        for name in ("lru", "learned")
    }


def main(args: Sequence[str] | None = None) -> None:
    """Print a table of medians over seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=60)
    parser.add_argument("--turns", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--oversubscription", type=float, default=2.0)
    asked = parser.parse_args(args)
    runs = [
        run(
            num_sessions=asked.sessions,
            num_turns=asked.turns,
            seed=seed,
            oversubscription=asked.oversubscription,
        )
        for seed in range(asked.seeds)
    ]
    print(f"{'hit rate, medians':20}{'all':>8}{'agents':>8}{'people':>8}")
    for name in ("lru", "learned"):
        found = [result[name] for result in runs]
        medians = [
            statistics.median(getattr(result, part) for result in found)
            for part in ("all", "agents", "people")
        ]
        print(f"{name:20}" + "".join(f"{value:8.1%}" for value in medians))


if __name__ == "__main__":
    main()
