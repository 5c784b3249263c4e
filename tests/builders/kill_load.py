"""A client that keeps account of what was acknowledged to it, and holds an engine to that.

A worker has sessions of its own and one request under way at a time. When the engine dies, each
session must be as the last answer left it, or as the unanswered request would have left it, and
nothing in between. Everything generated is compared with the cold oracle.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
import zmq

from sessionkv import SamplingParams
from tests.builders.checksum import tokens
from tests.builders.engine import oracle

MAX_SESSIONS = 4
MAX_LOG = 160
_LAST_WORDS_MS = 60
"""How long what a dead engine had sent may take through this process's own queues."""
_ENDING = ("engine_closed", "connection_lost")


class EngineGone(Exception):
    """The engine has died and has said nothing more, or is about to end."""


class EngineClosing(EngineGone):
    """The engine refused: nothing was changed."""


@dataclass(frozen=True, slots=True)
class State:
    """A session: all its tokens, and where each turn ends."""

    log: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One request, and what it does.

    Attributes:
        changes: Sessions as they are once it is carried out; None for one that is gone.
        want: Tokens of the reply of a turn or generation.
    """

    kind: str
    fields: Mapping[str, Any]
    changes: Mapping[str, State | None]
    want: tuple[int, ...] | None = None

    @property
    def is_keyed(self) -> bool:
        return self.fields.get("idempotency_key") is not None


@dataclass
class Found:
    """How much of a session's history the first turn after a restart found.

    Attributes:
        age_s: From the answer to its last turn to the kill.
        known: Tokens whose KV some engine had computed.
        cached: Tokens of them that were loaded.
    """

    age_s: float
    known: int
    cached: int


@dataclass
class Account:
    """What a worker saw, over all its engines."""

    acknowledged: int = 0
    turns_checked: int = 0
    sessions_checked: int = 0
    committed_unanswered: int = 0
    repeated_unanswered: int = 0
    replayed_acknowledged: int = 0
    found: list[Found] = field(default_factory=list)


class Line:
    """A connection that notices the engine's death."""

    def __init__(self, endpoint: str, dead: threading.Event) -> None:
        self._dead = dead
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(endpoint)
        self._last_id = 0

    def call(self, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and take its terminal reply.

        Raises:
            EngineGone: There is none and will be none, or the engine is closing and refuses it.
        """
        self._last_id += 1
        frame = {"v": 1, "t": kind, "id": self._last_id, **fields}
        self._socket.send(msgpack.packb(frame))
        while True:
            was_dead = self._dead.is_set()
            if not self._socket.poll(_LAST_WORDS_MS if was_dead else 5):
                if was_dead:
                    raise EngineGone
                continue
            reply: dict[str, Any] = msgpack.unpackb(self._socket.recv(), strict_map_key=False)
            if reply["id"] != self._last_id or reply["t"] in ("delta", "restarted"):
                continue
            if reply["t"] == "error" and reply["code"] in _ENDING:
                raise EngineClosing
            return reply

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()


class Worker:
    """One client, over the lives of many engines."""

    def __init__(self, number: int, seed: int) -> None:
        self.account = Account()
        self._rng = random.Random(f"{seed}/{number}")
        self._prefix = f"w{number}-"
        self._world: dict[str, State] = {}
        self._answered_at: dict[str, float] = {}
        self._pending: Request | None = None
        self._recent: deque[tuple[Request, dict[str, Any]]] = deque(maxlen=8)
        self._made = 0
        self._keys = 0

    # -- load

    def run(self, endpoint: str, dead: threading.Event, stop: threading.Event) -> None:
        """Check what is left, then work until told to stop or the engine has died."""
        with Line(endpoint, dead) as line, contextlib.suppress(EngineGone):
            line.call("hello", {})
            self._check(line)
            while not stop.is_set():
                self._do(line, self._choose())

    def died(self, at_s: float) -> None:
        """The engine ended at this (monotonic) time."""
        self._ages = {name: at_s - then for name, then in self._answered_at.items()}
        self._answered_at.clear()

    _ages: Mapping[str, float] = {}

    def _do(self, line: Line, request: Request) -> dict[str, Any] | None:
        """Carry out a request; None for a pin that the engine refused."""
        self._pending = request
        try:
            reply = line.call(request.kind, request.fields)
        except EngineClosing:
            self._pending = None
            raise
        self._pending = None
        if reply["t"] == "error":
            assert reply["code"] == "pin_refused", (request, reply)
            return None
        self._apply(request)
        self.account.acknowledged += 1
        if request.want is not None:
            assert tuple(reply["tokens"]) == request.want, (request, reply)
            if request.is_keyed:
                self._recent.append((request, reply))
        return reply

    def _apply(self, request: Request) -> None:
        for name, state in request.changes.items():
            if state is None:
                self._world.pop(name, None)
                self._answered_at.pop(name, None)
            else:
                self._world[name] = state
                if request.want is not None:
                    self._answered_at[name] = time.monotonic()

    # -- what is asked for

    def _choose(self) -> Request:
        rng, world = self._rng, self._world
        if len(world) < 2:
            return self._open()
        name = rng.choice(sorted(world))
        state = world[name]
        if len(state.log) > MAX_LOG or len(world) > MAX_SESSIONS:
            return Request("close", {"session": name, "keep": False}, {name: None})
        dice = rng.random()
        if dice < 0.72:
            return self._turn(name, keyed=dice < 0.6)
        if dice < 0.78:
            return self._generate(state)
        if dice < 0.84:
            copy = self._new_name()
            return Request("fork", {"session": name, "name": copy}, {copy: state})
        if dice < 0.89 and state.ends:
            ends = state.ends[:-1]
            shorter = State(state.log[: ends[-1] if ends else 0], ends)
            return Request("rewind", {"session": name}, {name: shorter})
        if dice < 0.93:
            tier = rng.choice(("host", "disk"))
            return Request("pin", {"session": name, "tier": tier, "ttl_s": 0.05}, {name: state})
        if dice < 0.96:
            return Request("flush", {}, {})
        return self._open()

    def _new_name(self) -> str:
        self._made += 1
        return f"{self._prefix}{self._made}"

    def _open(self) -> Request:
        name = self._new_name()
        return Request("open", {"session": name}, {name: State()})

    def _turn(self, name: str, *, keyed: bool = True) -> Request:
        state = self._world[name]
        delta = self._delta()
        sampling = self._sampling()
        prompt = (*state.log, *delta)
        want = tuple(oracle(prompt, SamplingParams(**sampling)))
        log = (*prompt, *want)
        fields = {"session": name, "tokens": delta, "sampling": sampling, "stream": True}
        after = State(log, (*state.ends, len(log)))
        return Request("turn", fields | self._key(keyed), {name: after}, want)

    def _generate(self, state: State) -> Request:
        prompt = [*state.log, *self._delta()]
        sampling = self._sampling()
        want = tuple(oracle(prompt, SamplingParams(**sampling)))
        fields = {"tokens": prompt, "sampling": sampling} | self._key(True)
        return Request("generate", fields, {}, want)

    def _delta(self) -> list[int]:
        return tokens(self._rng.randint(1, 9), start=self._rng.randrange(90))

    def _sampling(self) -> dict[str, Any]:
        rng = self._rng
        return {
            "temperature": rng.choice((0.0, 1.0)),
            "seed": rng.randrange(1000),
            "max_tokens": rng.randint(1, 5),
            "ignore_eos": True,
        }

    def _key(self, keyed: bool) -> dict[str, Any]:
        self._keys += keyed
        return {"idempotency_key": f"{self._prefix}{self._keys}"} if keyed else {}

    # -- what must hold after a restart

    def _check(self, line: Line) -> None:
        self._check_pending(line)
        # Sessions are not compared before: what was under way may have made or removed one.
        assert dict(self._found_sessions(line)) == self._sizes(self._world)
        for request, reply in self._rng.sample(list(self._recent), min(2, len(self._recent))):
            again = line.call(request.kind, request.fields)
            different = {"id", "attempt", "replayed"}
            assert {k: v for k, v in again.items() if k not in different} == {
                k: v for k, v in reply.items() if k not in different
            }, request
            assert again["replayed"] is True
            self.account.replayed_acknowledged += 1
        names = sorted(self._world)
        for name in self._rng.sample(names, min(2, len(names))):
            self._check_next_turn(line, name)
        self.account.sessions_checked += len(names)

    def _check_pending(self, line: Line) -> None:
        """Carried out wholly or not at all; repeated, it is what it would have been."""
        request = self._pending
        if request is None:
            return
        found = dict(self._found_sessions(line))
        before = self._sizes(self._world)
        after = self._sizes(self._world | request.changes)
        assert found in (before, after), (request, found, before, after)
        carried_out = found == after and before != after
        self.account.committed_unanswered += carried_out
        if not request.is_keyed:
            if found == after:
                self._apply(request)
            self._pending = None
            return
        # It stays pending until it is answered: the engine may die once more.
        reply = line.call(request.kind, request.fields)
        assert reply["t"] == "done", reply
        assert tuple(reply["tokens"]) == request.want, (request, reply)
        if before != after:
            assert reply["replayed"] is carried_out, (request, reply)
        self._apply(request)
        self._pending = None
        self._recent.append((request, reply))
        self.account.repeated_unanswered += 1

    def _check_next_turn(self, line: Line, name: str) -> None:
        known = max(len(self._world[name].log) - 1, 0)
        reply = self._do(line, self._turn(name))
        assert reply is not None
        report = reply["cache"]
        cached = sum(report[f"{tier}_tokens"] for tier in ("device", "host", "disk"))
        assert cached + report["computed_tokens"] == report["prompt_tokens"]
        self.account.turns_checked += 1
        if name in self._ages and known:
            self.account.found.append(Found(self._ages[name], known, min(cached, known)))

    def _found_sessions(self, line: Line) -> Iterator[tuple[str, tuple[int, int]]]:
        reply = line.call("list", {"prefix": self._prefix})
        for info in reply["value"]["sessions"]:
            yield info["name"], (info["tokens"], info["turns"])

    @staticmethod
    def _sizes(world: Mapping[str, State | None]) -> dict[str, tuple[int, int]]:
        return {
            name: (len(state.log), len(state.ends))
            for name, state in world.items()
            if state is not None
        }
