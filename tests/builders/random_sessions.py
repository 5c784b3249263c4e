"""Random conversations on one engine, each turn checked against the cold oracle.

Every worker thread owns its sessions, so it knows each one's log exactly whatever the others do;
what is shared is the engine: its device blocks, tiers, prefixes and steps. Seeded by worker.
"""

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from sessionkv import CacheReport, Client, MissReason, SamplingParams
from sessionkv.client.results import TurnResult
from sessionkv.errors import TurnError
from tests.builders.checksum import tokens
from tests.builders.engine import oracle

PREFIXES = [tokens(length, start=1000 * i) for i, length in enumerate((6, 13, 20, 29, 40))]
"""What conversations begin with; few, so that sessions share blocks."""


@dataclass(frozen=True)
class Mix:
    """How likely each thing is, tried in this order before a plain turn.

    Attributes:
        max_log: A session that is longer is deleted, so that every turn fits.
        faults: Turns may fail (their session must then be as before).
    """

    fork: float = 0.08
    rewind: float = 0.08
    cancel: float = 0.08
    keep: float = 0.08
    generate: float = 0.08
    reopen: float = 0.04
    delete: float = 0.02
    flush: float = 0.01
    max_tokens: int = 8
    max_delta: int = 9
    max_log: int = 10_000
    faults: bool = False


@dataclass
class _Conversation:
    name: str
    log: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


@dataclass
class Tally:
    """What happened, over all workers."""

    turns: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    recomputed_tokens: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, report: CacheReport) -> None:
        self.turns += 1
        self.prompt_tokens += report.prompt_tokens
        self.device_tokens += report.device_tokens
        self.host_tokens += report.host_tokens
        self.disk_tokens += report.disk_tokens
        self.recomputed_tokens += report.recomputed_tokens
        self.reasons[report.miss.reason.value] += 1


class _Worker:
    """One thread's conversations."""

    def __init__(self, client: Client, number: int, seed: int, mix: Mix) -> None:
        self.client = client
        self.rng = random.Random(f"{seed}/{number}")
        self.number = number
        self.mix = mix
        self.tally = Tally()
        self.sessions: list[_Conversation] = []
        self.finished: list[_Conversation] = []
        self._made = 0

    def run(self, num_sessions: int, num_turns: int) -> None:
        for _ in range(num_sessions):
            self._open()
        for _ in range(num_sessions * num_turns):
            self._one()

    def _open(self) -> _Conversation:
        self._made += 1
        conversation = _Conversation(f"w{self.number}-{self._made}")
        self.client.open(conversation.name)
        self.sessions.append(conversation)
        return conversation

    def _one(self) -> None:
        rng, mix = self.rng, self.mix
        it = rng.choice(self.sessions)
        if len(it.log) > mix.max_log:
            self._delete(it)
            return
        dice = rng.random()
        for name in ("fork", "rewind", "cancel", "keep", "generate", "reopen", "delete", "flush"):
            dice -= getattr(mix, name)
            if dice < 0:
                getattr(self, f"_{name}")(it)
                return
        self._turn(it)

    # What may happen ---------------------------------------------------------------------------

    def _turn(self, it: _Conversation) -> None:
        delta, sampling = self._delta(it), self._sampling()
        try:
            result = self.client.session(it.name).turn(tokens=delta, sampling=sampling)
        except TurnError:
            self._failed(it)
            return
        self._took(it, delta, sampling, result)

    def _cancel(self, it: _Conversation, *, keep: bool = False) -> None:
        delta, sampling = self._delta(it), self._sampling()
        stream = self.client.session(it.name).stream(tokens=delta, sampling=sampling)
        try:
            for _ in range(self.rng.randint(0, 3)):
                if next(stream, None) is None:
                    break
            result = stream.cancel(keep=keep)
        except TurnError:
            self._failed(it)
            return
        self.tally.cancelled += 1
        if result is not None:
            self._took(it, delta, sampling, result)
        self._check_info(it)

    def _keep(self, it: _Conversation) -> None:
        self._cancel(it, keep=True)

    def _fork(self, it: _Conversation) -> None:
        self._made += 1
        copy = _Conversation(f"w{self.number}-{self._made}", list(it.log), list(it.ends))
        self.client.session(it.name).fork(copy.name)
        self.sessions.append(copy)

    def _rewind(self, it: _Conversation) -> None:
        if not it.ends:
            return
        turns = self.rng.randint(1, min(3, len(it.ends)))
        self.client.session(it.name).rewind(turns)
        del it.ends[-turns:]
        del it.log[it.ends[-1] if it.ends else 0 :]

    def _generate(self, it: _Conversation) -> None:
        shared = it.log[: self.rng.randint(0, len(it.log))]
        prompt = [*shared, *tokens(self.rng.randint(1, 5), start=self.rng.randrange(90))]
        sampling = self._sampling()
        try:
            result = self.client.generate(
                tokens=prompt, sampling=sampling, cache=self.rng.random() < 0.9
            )
        except TurnError:
            self._failed(None)
            return
        self._check(prompt, sampling, result)

    def _reopen(self, it: _Conversation) -> None:
        with self.client.open(it.name):
            self._check_info(it)

    def _delete(self, it: _Conversation) -> None:
        """Delete a session at rest, or with a turn of it somewhere on its way."""
        if self.rng.random() < 0.5 or len(it.log) > self.mix.max_log:  # too long for another turn
            self.client.delete(it.name)
        else:
            delta, sampling = self._delta(it), self._sampling()
            stream = self.client.session(it.name).stream(tokens=delta, sampling=sampling)
            with contextlib.suppress(TurnError):
                if self.rng.random() < 0.5:
                    next(stream, None)
            self.client.delete(it.name)
            with contextlib.suppress(TurnError):
                for _ in stream:
                    pass
            if stream.result is not None:
                self._check([*it.log, *delta], sampling, stream.result)
        self.sessions.remove(it)
        self._open()

    def _flush(self, it: _Conversation) -> None:
        del it
        self.client.flush()

    # What must hold ----------------------------------------------------------------------------

    def _delta(self, it: _Conversation) -> list[int]:
        begin = [] if it.log else self.rng.choice(PREFIXES)
        more = tokens(self.rng.randint(1, self.mix.max_delta), start=self.rng.randrange(90))
        return [*begin, *more]

    def _sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.rng.choice((0.0, 1.0)),
            seed=self.rng.randrange(1000),
            max_tokens=self.rng.randint(1, self.mix.max_tokens),
            ignore_eos=True,
        )

    def _took(
        self, it: _Conversation, delta: list[int], sampling: SamplingParams, result: TurnResult
    ) -> None:
        prompt = [*it.log, *delta]
        self._check(prompt, sampling, result)
        # The last token of the log before had no KV yet.
        self._check_miss(len(it.log) - 1, result.cache)
        it.log = [*prompt, *result.tokens]
        it.ends.append(len(it.log))

    def _check(self, prompt: list[int], sampling: SamplingParams, result: TurnResult) -> None:
        want = oracle(prompt, sampling)
        if result.finish_reason.value == "cancelled":
            assert result.tokens, "a kept turn has at least the token that was seen"
            want = want[: len(result.tokens)]
        assert list(result.tokens) == want, (prompt, sampling, result)
        report = result.cache
        assert report.prompt_tokens == len(prompt)
        assert report.cached_tokens + report.computed_tokens == len(prompt), report
        assert report.computed_tokens >= 1
        self.tally.add(report)

    def _check_miss(self, known: int, report: CacheReport) -> None:
        miss, missed = report.miss, sum(report.miss_tokens.values())
        # Holes may lie before what was loaded, and other turns may have had what is new here.
        most = min(max(known, 0), report.computed_tokens)
        assert max(known - report.cached_tokens, 0) <= missed <= most, report
        if known <= 0:
            assert (miss.reason, miss.token) == (MissReason.FIRST_TURN, None), report
        elif not missed:
            assert (miss.reason, miss.token) == (MissReason.NONE, None), report
        else:
            assert miss.reason not in (MissReason.NONE, MissReason.FIRST_TURN), report
            assert miss.token is not None, report
            assert miss.token <= report.cached_tokens, report
            assert miss.token < known, report

    def _failed(self, it: _Conversation | None) -> None:
        assert self.mix.faults, "a turn failed without a fault"
        self.tally.failed += 1
        if it is not None:
            self._check_info(it)

    def _check_info(self, it: _Conversation) -> None:
        info = self.client.session(it.name).info()
        assert (info.tokens, info.turns) == (len(it.log), len(it.ends))


def run_sessions(
    client: Client | Callable[[], Client],
    *,
    seed: int,
    sessions: int,
    turns: int,
    workers: int = 8,
    mix: Mix | None = None,
) -> tuple[Tally, dict[str, list[int]]]:
    """Run ``sessions`` conversations of about ``turns`` turns each on ``workers`` threads.

    Args:
        client: One for all workers, or a maker of one for each.
        seed: Of everything the workers choose; what meets what in a step is up to the threads.
        sessions: In all; forks come on top.
        turns: Of each session, on average.
        workers: Threads.
        mix: What happens how often.

    Returns:
        The tally, and the log of each session that is left, by name.
    """
    crew = [
        _Worker(client() if callable(client) else client, i, seed, mix or Mix())
        for i in range(workers)
    ]
    failures: list[BaseException] = []

    def work(worker: _Worker) -> None:
        try:
            worker.run(sessions // workers, turns)
        except Exception as failure:  # noqa: BLE001 - raised again below
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in crew]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    total = Tally()
    for worker in crew:
        for name, count in vars(worker.tally).items():
            setattr(total, name, getattr(total, name) + count)
    return total, {it.name: it.log for worker in crew for it in worker.sessions}
