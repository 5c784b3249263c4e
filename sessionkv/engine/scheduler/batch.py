"""One plan while it is being built: a token budget and what it was spent on."""

from __future__ import annotations

from dataclasses import dataclass

from sessionkv.engine.scheduler.kv import KVCache
from sessionkv.engine.scheduler.sequence import Sequence, SequenceState
from sessionkv.types import PENDING, BlockCopy, SequenceStart, SequenceStep

_PENDING_IDS = (PENDING,)


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Most tokens of one step.

    Attributes:
        alone: While nobody decodes: few large steps are the quickest way through a long prompt.
        shared: While somebody decodes, who waits for the whole step; at most ``alone``. Also bounds
            the sequences that run at once, since all of them may decode.
        small: Up to here a step costs the host next to nothing, and prompts by turns come as far as
            they do together; 0 where that is not so.
    """

    alone: int
    shared: int
    small: int = 0

    def most_running(self, asked: int) -> int:
        """Sequences that run at once where so many are asked for: a step holds one of each."""
        return min(asked, self.shared)


class Batch:
    """Steps of sequences that already have the blocks they write to.

    Those that decode are added first, so that the others get what is then left.

    Attributes:
        budget: Tokens that may still be planned.
        by_turns: A small step is not made large by further prompts: they are left to the next one.
        sequences: Those planned, in the order of ``steps``.
    """

    __slots__ = (
        "_kv", "_leaves", "_num_decodes", "_num_prompt_tokens", "_shared_budget", "_small",
        "budget", "by_turns", "copies", "sequences", "starts", "steps",
    )  # fmt: skip

    def __init__(self, kv: KVCache, budget: StepBudget) -> None:
        self._kv = kv
        self._num_decodes = self._num_prompt_tokens = 0
        self._shared_budget = budget.shared
        self._small = budget.small
        self._leaves = False
        self.by_turns = False
        self.budget = budget.alone
        self.starts: list[SequenceStart] = []
        self.steps: list[SequenceStep] = []
        self.copies: list[BlockCopy] = []
        self.sequences: list[Sequence] = []

    @property
    def only_decodes(self) -> bool:
        """Whether nothing of a prompt is computed."""
        return self._num_decodes == len(self.sequences)

    def add_decodes(self, sequences: list[Sequence], *, may_be_read: bool) -> None:
        """Compute the one token that each of them sampled last.

        Args:
            sequences: In their order.
            may_be_read: Somebody may be admitted into this plan, and read what it fills.
        """
        if not sequences:
            return
        steps, block_size = self.steps, self._kv.block_size
        for sequence in sequences:
            token_ids = sequence.token_ids
            end = len(token_ids)
            steps.append(
                SequenceStep(sequence.seq_id, end - 1, token_ids[-1:], sequence.new_block_ids, True)
            )
            sequence.new_block_ids = ()
            sequence.num_in_flight += 1
            sequence.num_staged = end
            # Inside a block there is nothing that others could match.
            if may_be_read and end % block_size == 0 and sequence.use_cache:
                self._kv.stage(sequence.seq_id, end)
        self.sequences += sequences
        self._num_decodes = len(sequences)
        self.budget = min(self.budget, self._shared_budget) - len(sequences)

    def add_ahead(self, sequences: list[Sequence]) -> None:
        """Compute the tokens that the step in flight samples for them.

        Nothing is staged: nobody is admitted into a plan made ahead.
        """
        steps = self.steps
        for sequence in sequences:
            position = len(sequence.token_ids)
            steps.append(
                SequenceStep(sequence.seq_id, position, _PENDING_IDS, sequence.new_block_ids, True)
            )
            sequence.new_block_ids = ()
            sequence.num_staged = position + 1
            sequence.num_in_flight += 1
        self.sequences += sequences
        self._num_decodes = len(sequences)

    def masks(self) -> dict[int, bytes]:
        """What those may sample that have a constraint and sample in this step."""
        return {
            step.seq_id: sequence.constraint.mask
            for sequence, step in zip(self.sequences, self.steps, strict=True)
            if sequence.constraint is not None and step.sample
        }

    def leaves(self, sequence: Sequence) -> bool:
        """Whether a prompt is left to the next step, as all after it are then.

        The first of a step would wait for the others, and these would be no sooner.
        """
        if self.by_turns and not self._leaves and not self.only_decodes:
            planned = self._num_decodes + self._num_prompt_tokens
            wanted = min(len(sequence.token_ids), sequence.compute_limit) - sequence.num_computed
            self._leaves = planned <= self._small < planned + wanted
        return self._leaves

    def add_prefill(self, sequence: Sequence) -> int:
        """Compute as much of the rest as the budget allows; how many tokens that is.

        A chunk that does not reach the end stops at a block boundary where it can, so that what it
        wrote can be shared.
        """
        start, known = sequence.num_computed, len(sequence.token_ids)
        end = min(known, start + self.budget, sequence.compute_limit)
        if end < known:
            boundary = end - end % self._kv.block_size
            end = boundary if boundary > start else end
        if not sequence.started:
            self._start(sequence, end)
        elif sequence.state is SequenceState.FETCHING:
            sequence.new_block_ids = self._next_blocks(sequence, end)
        self.steps.append(
            SequenceStep(
                sequence.seq_id,
                start,
                sequence.token_ids[start:end],
                sequence.new_block_ids,
                sample=end == known,
            )
        )
        sequence.new_block_ids = ()
        self.sequences.append(sequence)
        sequence.num_in_flight += 1
        sequence.num_staged = end
        if sequence.use_cache:
            self._kv.stage(sequence.seq_id, end)
        self.budget -= end - start
        self._num_prompt_tokens += end - start
        return end - start

    def _next_blocks(self, sequence: Sequence, end: int) -> tuple[int, ...]:
        """Blocks that the runner has to know now.

        While some blocks are still to be loaded, those that hold positions below ``end``: the
        table of the runner ends with the front.
        """
        known, table = sequence.num_known_blocks, self._kv.block_table(sequence.seq_id)
        if sequence.state is SequenceState.FETCHING:
            table = table[: -(-end // self._kv.block_size)]
        sequence.num_known_blocks = len(table)
        return tuple(table[known:])

    def _start(self, sequence: Sequence, end: int) -> None:
        sequence.num_known_blocks = 0
        self.starts.append(
            SequenceStart(
                sequence.seq_id,
                self._next_blocks(sequence, end),
                sequence.num_computed,
                sequence.token_ids,
                sequence.num_prompt_tokens,
                sequence.sampling,
                sequence.stop_token_ids,
                sequence.wants_prompt_logprobs,
            )
        )
        self.copies.extend(sequence.copies)
        sequence.copies = ()
        sequence.new_block_ids = ()
        sequence.started = True
