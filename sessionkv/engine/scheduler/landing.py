"""What a step that has ended did to its sequences.

They got a token, ended, failed, or have to be computed again because they read what a failed one
wrote. Knows sequences and the cache, neither plans to come nor queues.
"""

from __future__ import annotations

from collections.abc import Collection

from sessionkv.engine.scheduler.fairness import OUTPUT_WEIGHT
from sessionkv.engine.scheduler.kv import KVCache
from sessionkv.engine.scheduler.lifecycle import Lifecycle
from sessionkv.engine.scheduler.sequence import Sequence, SequenceEvent, SequenceState
from sessionkv.types import FinishReason, MissReason, SampledToken, StepOutput, StepPlan, Tier


class Landing:
    """Takes in steps for a scheduler, whose cache and sequences these are."""

    def __init__(self, kv: KVCache, life: Lifecycle) -> None:
        self._kv = kv
        self._life = life

    def commit(
        self, plan: StepPlan, sequences: list[Sequence], output: StepOutput, now: float
    ) -> list[SequenceEvent]:
        """Take in a plan that was computed; see ``Scheduler.commit``."""
        events: list[SequenceEvent] = []
        spoiled = self._roll_back(sequences, output, events) if output.failed else ()
        sampled, is_ahead = output.sampled, plan.is_ahead
        if output.prompt_logprobs:
            self._keep_prompt_logprobs(plan, sequences, output, spoiled)
        for sequence, step in zip(sequences, plan.steps, strict=True):
            seq_id, start, token_ids, _, samples = step
            if seq_id in spoiled:
                continue
            sequence.num_in_flight -= 1
            goes_on = sequence.goes_on
            if is_ahead and not goes_on:
                self._life.landed(sequence)
                continue
            end = start + len(token_ids)
            sequence.num_computed = end
            if start < sequence.num_prompt_tokens:
                self._count_prefill(sequence, start, end)
            if start < sequence.computed_before:
                again = min(end, sequence.computed_before) - start
                sequence.accounting.recomputed_tokens += again
            if sequence.use_cache:
                self._kv.commit(seq_id, end)
            if not goes_on:
                self._life.landed(sequence)
            elif samples:
                events.append(self._sampled(sequence, sampled[seq_id], now))
            elif sequence.num_output_tokens >= sequence.max_output_tokens:
                events.append(self._life.finish(sequence, None))
        self._kv.unstage()
        return events

    def _keep_prompt_logprobs(
        self,
        plan: StepPlan,
        sequences: list[Sequence],
        output: StepOutput,
        spoiled: Collection[int],
    ) -> None:
        for sequence, step in zip(sequences, plan.steps, strict=True):
            entries = output.prompt_logprobs.get(step.seq_id)
            if entries and step.seq_id not in spoiled:
                sequence.add_prompt_logprobs(step.start, entries)

    def fail(self, sequences: list[Sequence], error: BaseException) -> list[SequenceEvent]:
        """Take in a plan that raised; see ``Scheduler.fail_step``."""
        events = []
        self._roll_back_fetching({sequence.seq_id for sequence in sequences}, sequences)
        for sequence in reversed(sequences):
            if self._landed(sequence):
                reason = f"its step raised {type(error).__name__}"
                events.append(self._life.fail(sequence, reason))
        self._kv.unstage()
        return events

    def _count_prefill(self, sequence: Sequence, start: int, end: int) -> None:
        """Note where the prompt's positions below ``end`` came from, those computed with a reason.

        ::

            | device | lost | found | not found |
                     ^ start        ^ found_tokens
        """
        accounting = sequence.accounting
        accounting.took(Tier.DEVICE, start)
        end = min(end, sequence.num_prompt_tokens)
        found = min(sequence.found_tokens, end)
        if sequence.lost and start < found:
            size = self._kv.block_size
            for position in range(start // size, -(-found // size)):
                reason = sequence.lost.get(position, MissReason.RECOMPUTE_WAS_SOONER)
                accounting.was_computed(min((position + 1) * size, found), reason)
        accounting.was_computed(found, MissReason.RECOMPUTE_WAS_SOONER)
        accounting.was_computed(end, None)

    def _sampled(self, sequence: Sequence, token: SampledToken, now: float) -> SequenceEvent:
        """Add a token to its sequence, which may end with it."""
        token_id = token.token_id
        sequence.chain.append(token_id)
        accounting = sequence.accounting
        accounting.last_token_at = now
        if accounting.first_token_at is None:
            accounting.first_token_at = now
        sequence.share.charge(OUTPUT_WEIGHT)
        num_output = len(sequence.token_ids) - sequence.num_prompt_tokens
        limit = sequence.max_output_tokens
        if num_output > limit:
            return self._life.finish(sequence, None)
        constraint = sequence.constraint
        # A constraint that lets an end token come before min_tokens lets nothing else come.
        if token_id in sequence.stop_token_ids and (
            num_output >= sequence.sampling.min_tokens or constraint is not None
        ):
            sequence.end_reason = FinishReason.STOP
            return self._life.finish(sequence, token, token_id)
        if num_output == limit:
            return self._life.finish(sequence, token)
        if constraint is not None and (reason := constraint.advance(token_id)) is not None:
            return self._life.fail(sequence, reason)
        return SequenceEvent(sequence.seq_id, token, num_output)

    def _landed(self, sequence: Sequence) -> bool:
        """A step came to nothing for a sequence; whether anybody wants to know."""
        sequence.num_in_flight -= 1
        self._life.landed(sequence)
        return sequence.goes_on

    def _roll_back(
        self, sequences: list[Sequence], output: StepOutput, events: list[SequenceEvent]
    ) -> set[int]:
        """End failed sequences and requeue those that read what they wrote; all their ids."""
        spoiled = self._roll_back_fetching(output.failed.keys(), sequences)
        # Readers first, so that nobody reads a block when its filler gives it up.
        for sequence in reversed(sequences):
            if sequence.seq_id not in spoiled or not self._landed(sequence):
                continue
            if sequence.seq_id in output.failed:
                events.append(self._life.fail(sequence, output.failed[sequence.seq_id]))
            else:
                self._life.roll_back(sequence)
        return spoiled

    def _roll_back_fetching(
        self, failed: Collection[int], planned: Collection[Sequence]
    ) -> set[int]:
        """Requeue readers of ``failed`` that are not ``planned`` themselves, as they still fetch.

        Returns:
            ``failed`` and all its readers.
        """
        spoiled = set(failed)
        for seq_id in failed:
            spoiled.update(self._kv.dependents(seq_id))
        for seq_id in spoiled:
            sequence = self._life.sequences.get(seq_id)
            if (
                sequence is not None
                and sequence.state is SequenceState.FETCHING
                and sequence not in planned
            ):
                self._life.roll_back(sequence)
        return spoiled
