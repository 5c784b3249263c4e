"""One running turn as the scheduler sees it: tokens, state, limits and what it cost so far.

Owned by the scheduler from ``add`` to ``release`` or ``cancel``; others read it. Knows no blocks
by hash, no tiers and no clock: every time is an argument.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from sessionkv.engine.scheduler.fairness import Share
from sessionkv.engine.scheduler.kv import Chain
from sessionkv.engine.scheduler.policy import Claims
from sessionkv.errors import SessionKVError
from sessionkv.types import (
    BlockCopy,
    CacheReport,
    DiskReceipt,
    FinishReason,
    Match,
    MissReason,
    SampledToken,
    SamplingParams,
    Tier,
)
from sessionkv.types.plan import PromptLogprobs

UNBOUNDED = sys.maxsize


class SequenceState(enum.Enum):
    """Where a sequence is in its life."""

    LOOKUP = "lookup"
    WAITING = "waiting"
    FETCHING = "fetching"
    RUNNING = "running"
    FINISHED = "finished"


_GOING_ON = (SequenceState.RUNNING, SequenceState.FETCHING)


class Constraint(Protocol):
    """Says which tokens a sequence may sample next, from what it sampled before.

    Attributes:
        mask: Packed bits, token ``i`` is bit ``i % 8`` of byte ``i // 8``.
    """

    @property
    def mask(self) -> bytes:
        """Of the next token."""
        ...

    def advance(self, token_id: int) -> str | None:
        """The token was sampled; why there can be no next one, None where :attr:`mask` is its."""
        ...


class SequenceEvent(NamedTuple):
    """What a step did to one sequence: a token, an end, or both; or a failure.

    Attributes:
        token: Sampled and counted; None when the sequence ended without a new token.
        finish: Why it ended, None while it goes on or where ``error`` is set.
        stop_token_id: The id that ended it, if one did; it is the last token.
        num_output_tokens: Tokens sampled that count; fewer than were sampled after ``cancel_at``.
        error: The sequence failed; its leases have ended and it is forgotten.
    """

    seq_id: int
    token: SampledToken | None
    num_output_tokens: int
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    error: SessionKVError | None = None


@dataclass(slots=True)
class Computed:
    """Prompt positions from ``start`` to ``end`` that were computed, not taken from a tier.

    Attributes:
        reason: Why, where they had been found; None where they had not.
    """

    start: int
    end: int
    reason: MissReason | None


@dataclass(slots=True)
class Accounting:
    """Figures of one sequence for its cache report.

    Each position of the prompt counts once, by where it came from when the front first passed it.
    Times are of the caller's clock, in seconds; None until the thing happened.

    Attributes:
        passed_tokens: Positions below it have been counted.
        computed: Those computed, in order.
        found: Tokens that the first admission found on the device, in host memory and on disk.
    """

    added_at: float = 0.0
    admitted_at: float | None = None
    ready_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    recomputed_tokens: int = 0
    passed_tokens: int = 0
    computed: list[Computed] = field(default_factory=list)
    found: tuple[int, int, int] = (0, 0, 0)

    def admitted(self, now: float, match: Match) -> None:
        """It has blocks, by what was found of it; only the first time counts."""
        if self.admitted_at is None:
            self.admitted_at = now
            self.found = (match.device_tokens, match.host_tokens, match.disk_tokens)

    def is_ready(self, now: float) -> None:
        """Nothing is to be loaded any more; only the first time counts."""
        if self.ready_at is None:
            self.ready_at = now

    def took(self, tier: Tier, end: int) -> None:
        """Positions not counted yet below ``end`` came from a tier."""
        count = max(0, end - self.passed_tokens)
        if tier is Tier.DEVICE:
            self.device_tokens += count
        elif tier is Tier.HOST:
            self.host_tokens += count
        else:
            self.disk_tokens += count
        self.passed_tokens += count

    def was_computed(self, end: int, reason: MissReason | None) -> None:
        """Positions not counted yet below ``end`` were computed."""
        start = self.passed_tokens
        if end <= start:
            return
        self.passed_tokens = end
        last = self.computed[-1] if self.computed else None
        if last is not None and (last.end, last.reason) == (start, reason):
            last.end = end
        else:
            self.computed.append(Computed(start, end, reason))

    def undo_admission(self) -> None:
        """The first admission came to nothing; the next one counts as the first."""
        self.admitted_at = self.ready_at = None
        self.device_tokens = self.host_tokens = self.disk_tokens = self.passed_tokens = 0
        self.computed.clear()

    def report(self, num_prompt_tokens: int, num_output_tokens: int) -> CacheReport:
        """The report without its miss part, which the scheduler cannot know."""
        first, last = self.first_token_at, self.last_token_at
        decode_s = last - first if first is not None and last is not None else 0.0
        cached = self.device_tokens + self.host_tokens + self.disk_tokens
        return CacheReport(
            prompt_tokens=num_prompt_tokens,
            device_tokens=self.device_tokens,
            host_tokens=self.host_tokens,
            disk_tokens=self.disk_tokens,
            computed_tokens=num_prompt_tokens - cached,
            recomputed_tokens=self.recomputed_tokens,
            queue_ms=_ms(self.added_at, self.admitted_at),
            fetch_ms=_ms(self.admitted_at, self.ready_at),
            prefill_ms=_ms(self.ready_at, first),
            ttft_ms=_ms(self.added_at, first),
            decode_tokens_per_s=(num_output_tokens - 1) / decode_s if decode_s > 0 else 0.0,
        )


def _ms(start: float | None, end: float | None) -> float:
    return (end - start) * 1000.0 if start is not None and end is not None else 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """One turn being computed. The first block of fields is the caller's, the rest private.

    Attributes:
        seq_id: Unique for the life of the engine.
        chain: The prompt with its hashes; the scheduler appends what is sampled.
        sampling: Validated, seed set.
        stop_token_ids: Ids that end the turn.
        priority: Higher goes first.
        deadline: Time of the caller's clock after which ``Scheduler.expired`` names it.
        group: Whom it counts for when tokens are shared out: (tenant, session).
        use_cache: False computes everything and leaves nothing behind.
        wants_prompt_logprobs: How many, see :class:`~sessionkv.types.SequenceStart`. Such a
            sequence computes everything and leaves it behind all the same.
        prompt_logprobs: Those computed so far, from the second token on.
        constraint: Decides which tokens it may sample. Goes on with each that counts, whatever
            becomes of its blocks meanwhile; a sequence that has one is not planned ahead.
        disk_was_late: What disk has of it was not waited for any longer.
        found_tokens: Leading tokens of the prompt that the last admission found, in any tier.
        lost: Blocks among them, by position in the table, that could not be loaded, and why.
        num_arrived: Blocks that were loaded for it since.
        num_awaited: Blocks that are on their way to it, where it can do nothing before all of them
            are answered; else 0.
        only_loads: More of it can be loaded, and it can do nothing else in the next step.
        held_back: What is to be loaded of it by a decision of which a part is begun; else None.
        compute_limit: Positions that the next step may compute end there.
        num_known_blocks: Blocks of the table that the runner has been told.
        num_staged: Positions below it are computed, or a step in flight computes them.
        num_in_flight: Steps in flight that compute it; its leases outlive them.
        leaves: Its leases end with the last of them, and ``keep_tokens`` of its log are kept.
    """

    seq_id: int
    chain: Chain
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    deadline: float | None = None
    group: tuple[str, str] = ("", "")
    use_cache: bool = True
    constraint: Constraint | None = None
    wants_prompt_logprobs: int | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)

    state: SequenceState = SequenceState.WAITING
    accounting: Accounting = field(default_factory=Accounting)
    num_prompt_tokens: int = field(init=False)
    token_ids: Seq[int] = field(init=False)
    max_output_tokens: int = 0
    end_reason: FinishReason = FinishReason.LENGTH
    num_kept_output_tokens: int | None = None

    # Queueing.
    arrival: int = 0
    resumed: bool = False
    share: Share = field(init=False)
    receipt: DiskReceipt | None = None
    ram_tokens: int = 0
    asked_at: int = 0
    tried_epoch: int = -1
    blocked_since: float | None = None
    wait: Wait | None = None

    # Running.
    admission_number: int = 0
    num_computed: int = 0
    num_staged: int = 0
    computed_before: int = 0
    capacity_tokens: int = 0
    new_block_ids: tuple[int, ...] = ()
    num_known_blocks: int = 0
    compute_limit: int = UNBOUNDED
    found_tokens: int = 0
    disk_was_late: bool = False
    lost: dict[int, MissReason] = field(default_factory=dict)
    num_arrived: int = 0
    num_awaited: int = 0
    only_loads: bool = False
    held_back: Claims | None = None
    copies: tuple[BlockCopy, ...] = ()
    holds_blocks: bool = False
    started: bool = False
    num_in_flight: int = 0
    leaves: bool = False
    keep_tokens: int | None = None
    awaited_spills: set[int] | None = None

    def __post_init__(self) -> None:
        """Note the prompt's length; ``token_ids`` is the chain's own list."""
        self.token_ids = self.chain.token_ids
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far that count."""
        if self.num_kept_output_tokens is not None:
            return self.num_kept_output_tokens
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def decodes(self) -> bool:
        """Whether its next step computes just the token that it sampled last."""
        return (
            len(self.token_ids) - self.num_computed == 1
            and self.started
            and self.state is SequenceState.RUNNING
        )

    @property
    def goes_on(self) -> bool:
        """Whether what a step computes for it is wanted: it holds blocks and has not ended."""
        return self.state in _GOING_ON

    @property
    def awaits_loads(self) -> bool:
        """Whether the next step can be planned without it."""
        return self.only_loads or self.num_awaited > 0

    @property
    def fills_blocks(self) -> bool:
        """Whether it is on its way through its prompt, so that others may wait for its blocks."""
        return self.goes_on and self.use_cache

    @property
    def reads_cache(self) -> bool:
        """Whether it takes what is cached of its prompt."""
        return self.use_cache and self.wants_prompt_logprobs is None

    def add_prompt_logprobs(self, start: int, entries: Seq[PromptLogprobs]) -> None:
        """Take in those of the tokens behind ``start``; what is computed again changes nothing."""
        self.prompt_logprobs += entries[len(self.prompt_logprobs) - start :]

    @property
    def progress(self) -> int:
        """Grows while it brings in blocks, in whatever way."""
        return self.num_staged + self.num_arrived

    @property
    def rank(self) -> tuple[int, int]:
        """Order among those that hold blocks: the last in it gives way first."""
        return (-self.priority, self.admission_number)

    def report(self) -> CacheReport:
        """Where the prompt came from and what it took, without the miss part."""
        return self.accounting.report(self.num_prompt_tokens, self.num_output_tokens)

    def leave_device(self) -> None:
        """Forget everything about blocks: the sequence is to be admitted anew."""
        self.num_computed = self.num_staged = self.capacity_tokens = self.num_arrived = 0
        self.new_block_ids = ()
        self.num_known_blocks = self.found_tokens = self.num_awaited = 0
        self.compute_limit = UNBOUNDED
        self.only_loads = False
        self.lost.clear()
        self.copies = ()
        self.started = False
        self.awaited_spills = None


@dataclass(slots=True)
class Wait:
    """A sequence lets another one, or a transfer, bring in its next block.

    Attributes:
        filler: The sequence that computes the block, or None.
        transfer_id: The transfer that loads it, or None.
        progress: The filler's ``progress`` when last looked at.
        since_step: Step in which that figure last changed.
    """

    filler: Sequence | None = None
    transfer_id: int | None = None
    progress: int = 0
    since_step: int = 0
