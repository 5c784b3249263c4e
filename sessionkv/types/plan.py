"""One step of the engine as plain data: what the scheduler decides and a runner carries out.

A plan names blocks by id and holds no tensors, so the same plan can be sent to several runners,
each with its shard of the same blocks. Plans are deltas: a runner keeps the block table of each
running sequence from its :class:`SequenceStart` to its end and appends what later steps add, so
that the size of a plan does not depend on the length of the history. What is made for every token
is a named tuple: it costs a third of a dataclass.

A plan may be made *ahead*, while the step before it is still being computed. It then only goes on
with sequences of that step: each computes the one token that is being sampled for it there, which
nobody knows yet, and has :data:`PENDING` in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from sessionkv.types.sampling import SamplingParams

PENDING = -1
"""In place of a token id: the one that the step before samples for the same sequence."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first ``num_tokens`` slots of device block ``src`` to ``dst``, before computing."""

    src: int
    dst: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """A sequence joins the batch (first admission, or again after a preemption).

    One that loaded blocks join in the middle of its prompt ends and starts in one plan, with more
    tokens cached.

    Attributes:
        seq_id: Unique for the life of the engine.
        block_ids: Block table so far; its slots below ``num_cached_tokens`` hold KV once this
            plan's copies, and the earlier sequences of this plan, are done.
        num_cached_tokens: Tokens whose KV need not be computed.
        token_ids: All tokens known now (prompt, and output already sampled when resuming). The
            runner may keep the reference and must not change it; the scheduler only appends to it.
        num_prompt_tokens: How many of ``token_ids`` are prompt; the rest is output. Penalties and
            the sampling counter go by it, so a resumed sequence continues exactly.
        sampling: Validated; ``seed`` is set (the engine draws one where the user gave none).
        stop_token_ids: Ids that end the turn (EOS ids and the user's); not sampled before
            ``sampling.min_tokens`` outputs, unless ``ignore_eos``.
        prompt_logprobs: How many log-probabilities of the likeliest tokens are wanted for each
            token of the prompt but the first, beside its own; None for nothing of it.
    """

    seq_id: int
    block_ids: tuple[int, ...]
    num_cached_tokens: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    prompt_logprobs: int | None = None

    def predicted(self, step: SequenceStep) -> Sequence[int]:
        """Tokens of the prompt that the first rows of a step predict, one each, if they are wanted.

        A row says what comes behind it; the last token of the prompt is behind no other row's.
        """
        if self.prompt_logprobs is None:
            return ()
        end = min(step.start + len(step.token_ids) + 1, self.num_prompt_tokens)
        return self.token_ids[step.start + 1 : end]


class SequenceStep(NamedTuple):
    """Tokens of one sequence to compute in this step.

    Position p of the sequence lives in slot ``p % block_size`` of block ``table[p // block_size]``.
    Query i (position ``start + i``) attends to positions 0 to ``start + i`` of its own sequence.

    Attributes:
        start: Position of the first of ``token_ids``.
        token_ids: At least one; :data:`PENDING` alone in a plan made ahead.
        new_block_ids: Blocks that join the end of the table before this step writes.
        sample: Whether to sample one token from the logits of the last position.
    """

    seq_id: int
    start: int
    token_ids: Sequence[int]
    new_block_ids: tuple[int, ...]
    sample: bool


_TOKEN_IDS, _SAMPLE = attrgetter("token_ids"), attrgetter("sample")


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does, in this order: ends, freed, copies, starts, steps.

    Every KV write of the step happens before the attention that may read it (layer by layer), so a
    sequence may read blocks that one earlier in ``steps`` fills in the same plan.

    Attributes:
        ends: Sequences that left the batch since the last plan (finished or preempted), and those
            that start anew in this one.
        freed_block_ids: Device blocks that became free since the last plan and still are; a
            checking runner poisons them, others ignore them.
        masks: seq_id -> the only tokens that its step may sample, at least one, where not all may.
            Packed in whole words of 32 bits: token ``i`` is bit ``i % 8`` of byte ``i // 8``.
            Applied after everything else that changes logits, and instead of what
            ``sampling.min_tokens`` rules out. None in a plan made ahead.
    """

    step_id: int
    starts: tuple[SequenceStart, ...] = ()
    steps: tuple[SequenceStep, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    ends: tuple[int, ...] = ()
    freed_block_ids: tuple[int, ...] = ()
    masks: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def is_ahead(self) -> bool:
        """Whether it was made while the step before it is computed: then all tokens are pending.

        Such a plan has neither starts nor copies, and every step of it samples.
        """
        return bool(self.steps) and self.steps[0].token_ids[0] == PENDING

    @property
    def num_tokens(self) -> int:
        """Tokens computed by the step."""
        return sum(map(len, map(_TOKEN_IDS, self.steps)))

    @property
    def num_samples(self) -> int:
        """Tokens sampled by the step."""
        return sum(map(_SAMPLE, self.steps))


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a token, from the raw logits before any processing."""

    token_id: int
    logprob: float


PromptLogprobs = Sequence[tuple[int, float]]
"""Of one token of a prompt: pairs of id and log-probability, plain as there may be very many."""


class SampledToken(NamedTuple):
    """One sampled token; ``logprobs`` is the token itself, then the top ones, best first."""

    token_id: int
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of a plan.

    Attributes:
        sampled: seq_id -> token, for each step with ``sample`` that succeeded.
        failed: seq_id -> reason, where the result is unusable (such as NaN logits); KV that the
            step wrote for these must not be matched.
        prompt_logprobs: seq_id -> entries of the tokens that its step predicts
            (:meth:`SequenceStart.predicted`), each the token itself, then the likeliest.
        computed_s: Seconds that it took by the device's own clock, from the launch or the end of
            the step before on; None where the runner has no such clock.
    """

    step_id: int
    sampled: Mapping[int, SampledToken] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Sequence[PromptLogprobs]] = field(default_factory=dict)
    computed_s: float | None = field(default=None, compare=False)
