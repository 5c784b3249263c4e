"""What the engine counts about itself: counters, durations, rates, the log line and advice.

Memory is bounded whatever the traffic, and a step costs a few hundred nanoseconds for each of its
sequences. Knows neither blocks nor sockets: what is only a state (queue, memory) comes in as
:class:`Gauges` when figures are asked for. Core thread only; times are arguments.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from sessionkv.engine.histogram import Histogram
from sessionkv.engine.messages import TurnFinished
from sessionkv.types import MoveOutcome, StepPlan, Tier, Transfer, TransferResult

LOG_INTERVAL_S = 10.0
SAMPLE_INTERVAL_S = 1.0
WINDOWS_S = {"10s": 10.0, "60s": 60.0}
ADVICE_BLOCKS = 1_000
"""Looked-up blocks from which on the hit rate says something."""
LOW_HIT_RATE, HIGH_HIT_RATE = 0.2, 0.5


@dataclass(frozen=True, slots=True)
class TierGauge:
    """One tier's memory now.

    Attributes:
        used_bytes: Bytes of blocks that hold something.
        cap_bytes: Bytes it may hold; 0 when it is off.
        leased_blocks: Blocks that sequences or transfers hold.
        wasted_bytes: Part of ``used_bytes`` that holds no token.
        evictions: Blocks it has dropped to make room.
        evictions_waited: Those of them that somebody had to wait for: their copy to a lower tier
            was not done.
        clean_blocks: Blocks of known content that a lower tier holds too; of the lowest, all.
        dirty_blocks: Blocks of known content that no lower tier holds.
    """

    used_bytes: int
    cap_bytes: int
    leased_blocks: int
    wasted_bytes: int
    evictions: int
    evictions_waited: int = 0
    clean_blocks: int = 0
    dirty_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Gauges:
    """What is state rather than history, as of one moment.

    Attributes:
        preallocated_bytes: KV of the running sequences if each had the maximum length reserved.
        running_bytes: KV blocks that they hold.
        looked_up_blocks: Full prompt blocks looked for, ever; ``hit_blocks`` of them were found.
    """

    requests_running: int
    requests_waiting: int
    sessions: int
    preemptions: int
    looked_up_blocks: int
    hit_blocks: int
    running_bytes: int
    preallocated_bytes: int
    tiers: dict[Tier, TierGauge]


@dataclass(slots=True)
class _Totals:
    """Counters that rates are made of."""

    computed_prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: int = 0
    steps: int = 0


@dataclass(slots=True)
class _Moves:
    transfers: int = 0
    blocks: int = 0
    bytes: int = 0
    failed_blocks: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Prompts:
    """Sums over committed turns' cache reports, in tokens."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    by_tier: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))

    @property
    def cached_tokens(self) -> int:
        return sum(self.by_tier.values())


class Metrics:
    """Fed by the core as things happen; read through :meth:`snapshot` and :meth:`log_line`."""

    def __init__(self) -> None:
        """Everything is 0."""
        self._totals = _Totals()
        self._prompts = _Prompts()
        self._moves: dict[tuple[Tier, Tier], _Moves] = {}
        self._finished: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._miss_turns: Counter[str] = Counter()
        self._miss_tokens: Counter[str] = Counter()
        self._durations = {
            name: Histogram()
            for name in (
                "ttft",
                "inter_token",
                "e2e",
                "queue",
                "fetch",
                "prefill",
                "decode",
                "step",
            )
        }
        self._book_errors = 0
        self._samples: deque[tuple[float, int, int]] = deque(maxlen=128)
        self._logged_at: float | None = None
        self._logged_steps = 0
        self._batch = 0

    # What happens ------------------------------------------------------------------------------

    def step(self, plan: StepPlan, elapsed_s: float, *, num_dropped: int = 0) -> None:
        """A step succeeded.

        Args:
            plan: What it computed.
            elapsed_s: Time since the step before it had ended, or since it was launched where it
                was launched later: what each token it sampled waited.
            num_dropped: Sequences that it decoded for nothing, as they had ended before.
        """
        num_steps, num_tokens, sampled = len(plan.steps), plan.num_tokens, plan.num_samples
        decoded = num_steps
        if plan.starts or not num_tokens == sampled == num_steps:
            decoded = _num_decoded(plan)
        totals = self._totals
        totals.steps += 1
        self._batch = num_steps
        totals.computed_prompt_tokens += num_tokens - decoded
        totals.generation_tokens += sampled - num_dropped
        decoded -= num_dropped
        self._durations["step"].observe(elapsed_s)
        if decoded:
            self._durations["inter_token"].observe(elapsed_s, decoded)

    def turn_finished(self, finished: TurnFinished, e2e_s: float) -> None:
        """A turn was committed, ``e2e_s`` after it came in."""
        cache, prompts, durations = finished.cache, self._prompts, self._durations
        self._totals.finished += 1
        self._finished[finished.reason.value] += 1
        prompts.prompt_tokens += cache.prompt_tokens
        prompts.computed_tokens += cache.computed_tokens
        prompts.recomputed_tokens += cache.recomputed_tokens
        prompts.by_tier[Tier.DEVICE] += cache.device_tokens
        prompts.by_tier[Tier.HOST] += cache.host_tokens
        prompts.by_tier[Tier.DISK] += cache.disk_tokens
        self._miss_turns[cache.miss.reason.value] += 1
        self._miss_tokens.update(cache.miss_tokens)
        durations["e2e"].observe(e2e_s)
        durations["ttft"].observe(cache.ttft_ms / 1000.0)
        if cache.decode_tokens_per_s:
            decoded = finished.num_output_tokens - 1
            durations["decode"].observe(decoded / cache.decode_tokens_per_s)
        durations["queue"].observe(cache.queue_ms / 1000.0)
        durations["prefill"].observe(cache.prefill_ms / 1000.0)
        if cache.host_tokens or cache.disk_tokens:
            durations["fetch"].observe(cache.fetch_ms / 1000.0)

    def turn_dropped(self, code: str) -> None:
        """A turn ended without being committed, with the error of this code."""
        self._dropped[code] += 1

    def transfer(self, transfer: Transfer, result: TransferResult, num_bytes: int) -> None:
        """Blocks were moved between tiers; ``num_bytes`` is that of all its moves."""
        moves = self._moves.setdefault((transfer.src, transfer.dst), _Moves())
        done = sum(outcome is MoveOutcome.OK for outcome in result.outcomes)
        moves.transfers += 1
        moves.blocks += done
        moves.bytes += num_bytes * done // max(len(result.outcomes), 1)
        moves.failed_blocks += len(result.outcomes) - done
        moves.seconds += result.elapsed_s

    def count_book_error(self) -> None:
        """The cache's books did not balance."""
        self._book_errors += 1

    # What can be read --------------------------------------------------------------------------

    def log_line(self, now: float) -> str | None:
        """One line every 10 s while steps are made, else None. To be called about once a second."""
        self._sample(now)
        if self._logged_at is None:
            self._logged_at = now
        if now - self._logged_at < LOG_INTERVAL_S:
            return None
        self._logged_at = now
        if self._totals.steps == self._logged_steps:
            return None
        self._logged_steps = self._totals.steps
        rates = self._rates(now, WINDOWS_S["10s"])
        up, down = self._bytes_moved()
        return (
            f"{self._batch} in the batch, prompt {rates[0]:,.0f} tokens/s, "
            f"generation {rates[1]:,.0f} tokens/s, {self._totals.finished:,} turns, "
            f"hit rate {self._hit_rate():.1%}, "
            f"TTFT p50 {self._durations['ttft'].quantile_s(0.5) * 1000:,.1f} ms, "
            f"inter-token p50 {self._durations['inter_token'].quantile_s(0.5) * 1000:,.1f} ms, "
            f"fetched {up / 2**20:,.1f} MiB, spilled {down / 2**20:,.1f} MiB"
        )

    def snapshot(self, now: float, gauges: Gauges) -> dict[str, Any]:
        """Everything as plain values, new on each call. O(1)."""
        self._sample(now)
        prompts, totals = self._prompts, self._totals
        values: dict[str, Any] = {
            "requests_running": gauges.requests_running,
            "requests_waiting": gauges.requests_waiting,
            "requests_finished": dict(self._finished),
            "requests_failed": dict(self._dropped),
            "sessions": gauges.sessions,
            "prompt_tokens": prompts.prompt_tokens,
            "generation_tokens": totals.generation_tokens,
            "computed_prompt_tokens": totals.computed_prompt_tokens,
            "recomputed_tokens": prompts.recomputed_tokens,
            "steps": totals.steps,
            "preemptions": gauges.preemptions,
            "book_errors": self._book_errors,
            "prefix_cache": {
                "queries_tokens": prompts.prompt_tokens,
                "hits_tokens": prompts.cached_tokens,
                "hit_rate": self._hit_rate(),
                "queries_blocks": gauges.looked_up_blocks,
                "hits_blocks": gauges.hit_blocks,
                "block_hit_rate": _share(gauges.hit_blocks, gauges.looked_up_blocks),
                **{f"{tier.value}_tokens": prompts.by_tier[tier] for tier in Tier},
            },
            "miss_tokens": dict(self._miss_tokens),
            "miss_turns": dict(self._miss_turns),
            "latency": {name: found.to_map() for name, found in self._durations.items()},
            "throughput": self._throughput(now),
            "transfers": {
                f"{a.value}_to_{b.value}": _moved(m) for (a, b), m in self._moves.items()
            },
            "kv": _memory(gauges),
        }
        values["advice"] = self.advice(gauges)
        return values

    def advice(self, gauges: Gauges) -> list[str]:
        """What the figures suggest, in words; empty while there is nothing to say."""
        if gauges.looked_up_blocks < ADVICE_BLOCKS:
            return []
        rate = _share(gauges.hit_blocks, gauges.looked_up_blocks)
        dropped = sum(gauges.tiers[tier].evictions for tier in (Tier.DEVICE, Tier.HOST))
        if rate < LOW_HIT_RATE:
            return [
                f"Only {rate:.0%} of the looked-up blocks were found. See whether "
                "cache.prefix_cache is on, whether clients resend histories that they change near "
                "the top (a date or an id in the system prompt), and what miss_turns says."
            ]
        if rate > HIGH_HIT_RATE and dropped:
            return [
                f"{rate:.0%} of the looked-up blocks were found, and {dropped:,} blocks had to "
                "leave device or host memory: a larger cache.device_bytes or cache.host_bytes is "
                "likely to save more computing."
            ]
        return []

    # Inside ------------------------------------------------------------------------------------

    def _hit_rate(self) -> float:
        return _share(self._prompts.cached_tokens, self._prompts.prompt_tokens)

    def _sample(self, now: float) -> None:
        if not self._samples or now - self._samples[-1][0] >= SAMPLE_INTERVAL_S:
            totals = self._totals
            counts = (totals.computed_prompt_tokens, totals.generation_tokens)
            self._samples.append((now, *counts))

    def _rates(self, now: float, window_s: float) -> tuple[float, float]:
        """Prompt and generated tokens a second since the oldest sample of the window."""
        for at, prompt_tokens, generation_tokens in self._samples:
            if now - at <= window_s and now > at:
                totals = self._totals
                return (
                    (totals.computed_prompt_tokens - prompt_tokens) / (now - at),
                    (totals.generation_tokens - generation_tokens) / (now - at),
                )
        return 0.0, 0.0

    def _throughput(self, now: float) -> dict[str, float]:
        values = {}
        for name, window_s in WINDOWS_S.items():
            prompt, generation = self._rates(now, window_s)
            values[f"prompt_tokens_per_second_{name}"] = prompt
            values[f"generation_tokens_per_second_{name}"] = generation
        return values

    def _bytes_moved(self) -> tuple[int, int]:
        """Bytes that went up and down between tiers."""
        up = sum(m.bytes for (a, b), m in self._moves.items() if a.rank > b.rank)
        return up, sum(m.bytes for m in self._moves.values()) - up


def _num_decoded(plan: StepPlan) -> int:
    """Sequences that computed their last output; the rest of the tokens is of prompts.

    A single token that samples is that, or the end of a prompt found cached.
    """
    started = {start.seq_id for start in plan.starts}
    return sum(
        step.sample and len(step.token_ids) == 1 and step.seq_id not in started
        for step in plan.steps
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _moved(moves: _Moves) -> dict[str, float]:
    return {
        "transfers": moves.transfers,
        "blocks": moves.blocks,
        "moved_bytes": moves.bytes,
        "failed_blocks": moves.failed_blocks,
        "busy_s": moves.seconds,
    }


def _memory(gauges: Gauges) -> dict[str, Any]:
    """Use of each tier, and what the running sequences hold against reserving the maximum."""
    values: dict[str, Any] = {
        tier.value: {
            "used_bytes": gauge.used_bytes,
            "cap_bytes": gauge.cap_bytes,
            "usage_rate": _share(gauge.used_bytes, gauge.cap_bytes),
            "leased_blocks": gauge.leased_blocks,
            "wasted_bytes": gauge.wasted_bytes,
            "waste_rate": _share(gauge.wasted_bytes, gauge.used_bytes),
            "evictions": gauge.evictions,
            "evictions_waited": gauge.evictions_waited,
            "clean_blocks": gauge.clean_blocks,
            "dirty_blocks": gauge.dirty_blocks,
        }
        for tier, gauge in gauges.tiers.items()
    }
    values["running_bytes"] = gauges.running_bytes
    values["preallocated_bytes"] = gauges.preallocated_bytes
    saved_bytes = gauges.preallocated_bytes - gauges.running_bytes
    values["saved_rate"] = _share(saved_bytes, gauges.preallocated_bytes)
    return values
