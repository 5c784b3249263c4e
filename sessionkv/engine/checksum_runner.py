"""A runner without a model: its KV is checksums, so that any wrong cell changes the answer.

Each position has a cell of 16 bytes: token id, position, checksum of all cells before it, checksum
of itself. A cell is chained to the one before it as *read back through the block table*, and the
next token is a hash of every cell read back the same way. A block that is stale, shifted, swapped,
cut short or somebody else's therefore changes the tokens, which makes exact equality with a cold
run (``next_token`` over ``extend``, no blocks at all) a fair test of everything above a runner.

It also checks each plan against the rules of ``sessionkv.types.plan`` and fills freed and fresh
blocks with 0xFF. Standard library only; knows nothing of hashes, tiers or sessions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from zlib import crc32

from sessionkv.engine.device_memory import HostPool
from sessionkv.engine.runner import LaterResult
from sessionkv.types import (
    PENDING,
    KVGeometry,
    SampledToken,
    SamplingParams,
    SequenceStart,
    SequenceStep,
    StepOutput,
    StepPlan,
    TokenLogprob,
)
from sessionkv.types.plan import PromptLogprobs

CELL_BYTES = 16
_CELL = struct.Struct("<IIII")
_M32 = 2**32 - 1
_M64 = 2**64 - 1
# A CRC taken over a message that holds its own running value forgets what came before, as all of
# it is linear. Multiplied by an odd number first, the value no longer cancels, yet is recovered.
_VEIL = 0x9E3779B1
_UNVEIL = pow(_VEIL, -1, 2**32)
_POISON = b"\xff"

Sampler = Callable[[list[float], SamplingParams, Sequence[int], int], int]
"""``(logits, sampling, token_ids, num_prompt_tokens) -> token id``, for testing real sampling."""


class PlanError(Exception):
    """A plan breaks the rules; whoever made it has a bug."""


def _mix(value: int) -> int:
    """Spread a number over 64 bits (the finaliser of SplitMix64)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _M64
    return value ^ (value >> 31)


def first_state(fingerprint: str) -> int:
    """State before any cell: another fingerprint stands for other weights."""
    return crc32(fingerprint.encode())


def make_cell(state: int, token_id: int, position: int) -> bytes:
    """The cell of one position, given the state of all cells before it."""
    veiled = state * _VEIL & _M32
    own = crc32(struct.pack("<III", token_id, position, veiled)) * _VEIL & _M32
    return _CELL.pack(token_id, position, veiled, own)


def _state_of(cell: bytes | memoryview) -> int:
    """State before the cell, as the cell itself has it."""
    veiled: int = _CELL.unpack(cell)[2]
    return veiled * _UNVEIL & _M32


def extend(state: int, token_id: int, position: int) -> int:
    """State after one more cell: the checksum over the bytes of all cells so far."""
    return crc32(make_cell(state, token_id, position), state)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Which ids may be sampled at all: those below ``size`` that are not in ``never``."""

    size: int
    never: frozenset[int] = frozenset()


def next_token(
    state: int,
    vocabulary: Vocabulary,
    *,
    sampling: SamplingParams,
    stop_token_ids: Collection[int],
    num_output_tokens: int,
    allowed: Collection[int] | None = None,
) -> int:
    """The token that follows ``state``.

    Greedy is a hash of the state alone; otherwise seed and the number of tokens sampled before are
    mixed in, so a sequence resumed with a wrong counter goes astray. Stop ids are not sampled
    before ``min_tokens``. Where only some are ``allowed`` it is the first of these, in an order
    that the same hash gives.
    """
    value = _mix(state + 1)
    if sampling.temperature > 0:
        value = _mix(value ^ _mix(((sampling.seed or 0) << 20) + num_output_tokens & _M64))
    if allowed is not None:
        return min(allowed, key=lambda token_id: _mix(value ^ token_id))
    early = num_output_tokens < sampling.min_tokens
    for _ in range(64 * vocabulary.size):
        token_id = value % vocabulary.size
        if token_id not in vocabulary.never and not (early and token_id in stop_token_ids):
            return token_id
        value = _mix(value + 0x9E3779B97F4A7C15 & _M64)
    raise PlanError("every token id is forbidden")


def pseudo_logits(state: int, vocabulary: Vocabulary) -> list[float]:
    """Numbers from -8 to 8 that depend on the state alone; ``-inf`` for ids never sampled."""
    base = _mix(state + 1)
    return [
        float("-inf") if i in vocabulary.never else (_mix(base + i & _M64) % 16001) / 1000 - 8
        for i in range(vocabulary.size)
    ]


def _fake_logprobs(state: int, token_id: int, vocab_size: int, count: int) -> SampledToken:
    """The token and ``count`` neighbours, with probabilities that depend on the state alone."""
    best = -(_mix(state) % 1000) / 1000
    tops = [TokenLogprob((token_id + i) % vocab_size, best - i) for i in range(count)]
    return SampledToken(token_id, (TokenLogprob(token_id, best), *tops))


class _Running:
    """What the runner keeps of one sequence between plans.

    Its tokens are the runner's own: those it started with and those sampled since.
    """

    __slots__ = ("known", "num_computed", "start", "table", "token_ids")

    def __init__(self, start: SequenceStart) -> None:
        self.start = start
        self.table = list(start.block_ids)
        self.token_ids = list(start.token_ids)
        self.num_computed = start.num_cached_tokens
        self.known = False


def _is_pending(step: SequenceStep) -> bool:
    return step.sample and list(step.token_ids) == [PENDING]


def checksum_geometry(block_size: int) -> KVGeometry:
    """Shape of a block of cells."""
    return KVGeometry(1, 1, 2, block_size, "uint32", 4)


class ChecksumRunner:
    """Implements :class:`sessionkv.engine.runner.Runner` over one ``bytearray``.

    Used by one thread. Computes a step when its result is asked for. A step costs a few
    microseconds a token; with ``full_read`` also about 15 ns for every position of the sequences
    that sample.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        vocab_size: int = 512,
        max_model_len: int = 4096,
        fingerprint: str = "checksum",
        full_read: bool = True,
        plans_ahead: bool = False,
        never_sample: Collection[int] = (),
        script: Callable[[Sequence[int]], int | None] | None = None,
        sampler: Sampler | None = None,
        gate: Callable[[StepPlan], None] | None = None,
        fail_step: Callable[[StepPlan], bool] | None = None,
        fail_sequence: Callable[[int, Sequence[int]], bool] | None = None,
    ) -> None:
        """Allocate the pool, filled with 0xFF.

        Args:
            num_blocks: Blocks of the pool.
            block_size: Positions a block.
            vocab_size: Sampled ids are below it.
            max_model_len: Most positions of one sequence.
            fingerprint: Stands for the weights: another one gives other KV and other tokens.
            full_read: Read every cell for each token sampled. Off, only the last one and one
                pseudo-random earlier one: a token's cost no longer grows with the history.
            plans_ahead: Whether the next step is to be planned before one is collected: nothing
                is won by it here, but the whole engine can be tested so.
            never_sample: Ids that are not sampled, such as end tokens.
            script: Given all tokens so far, the one to sample next, or None for the hash.
            sampler: Chooses from pseudo-logits instead of the hash.
            gate: Called with the plan before anything else; may wait.
            fail_step: Whether to raise in the middle of this plan.
            fail_sequence: Given seq_id and all its tokens: whether the step's result for it is to
                be unusable, as with NaN logits.
        """
        self.geometry = checksum_geometry(block_size)
        self.num_blocks = num_blocks
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.fingerprint = fingerprint
        self.weights_bytes = 0
        self.pool_bytes = num_blocks * self.geometry.block_bytes
        self._block_size = block_size
        self._memory = memoryview(bytearray(_POISON * self.pool_bytes))
        self._first_state = first_state(fingerprint)
        self._vocabulary = Vocabulary(vocab_size, frozenset(never_sample))
        self._full_read = full_read
        self.plans_ahead = plans_ahead
        self._script = script
        self._sampler = sampler
        self._gate = gate
        self._fail_step = fail_step
        self._fail_sequence = fail_sequence
        self._running: dict[int, _Running] = {}
        self._fill = [0] * num_blocks
        self._holders = [0] * num_blocks
        self._last_step_id = -1

    def block_view(self, block_id: int) -> memoryview:
        """Writable bytes of one block; valid for the life of the runner."""
        size = self.geometry.block_bytes
        return self._memory[block_id * size : (block_id + 1) * size]

    @property
    def memory(self) -> HostPool:
        """See :class:`~sessionkv.engine.runner.Runner`."""
        return HostPool(self.block_view)

    def close(self) -> None:
        """Forget all sequences; views handed out stay valid."""
        self._running.clear()

    def prepare_thread(self) -> None:
        """Nothing: no thread has anything for itself."""

    def launch(self, plan: StepPlan) -> LaterResult:
        """See :class:`~sessionkv.engine.runner.Runner`."""
        return LaterResult(partial(self.execute, plan))

    def execute(self, plan: StepPlan) -> StepOutput:
        """Carry out one plan.

        Raises:
            PlanError: The plan breaks a rule.
            RuntimeError: ``fail_step`` asked for it; half of the plan's cells are written.
        """
        if self._gate is not None:
            self._gate(plan)
        if plan.step_id <= self._last_step_id:
            raise PlanError(f"step {plan.step_id} comes after step {self._last_step_id}")
        self._last_step_id = plan.step_id
        self._enter(plan)
        failing = self._fail_step is not None and self._fail_step(plan)
        sampled: dict[int, SampledToken] = {}
        failed: dict[int, str] = {}
        prompts: dict[int, list[PromptLogprobs]] = {}
        if len({step.seq_id for step in plan.steps}) != len(plan.steps):
            raise PlanError("a sequence has two steps in one plan")
        for i, step in enumerate(plan.steps):
            if failing and i >= len(plan.steps) // 2:
                raise RuntimeError(f"step {plan.step_id} was told to fail")
            sequence = self._known(step)
            if _is_pending(step) and step.start == len(sequence.token_ids):
                failed[step.seq_id] = "the step before sampled nothing"
                continue
            self._check(sequence, step)
            if self._fail_sequence is not None and self._fail_sequence(
                step.seq_id, sequence.token_ids
            ):
                failed[step.seq_id] = "NaN in the logits"
                self._skip(sequence, step)
                continue
            self._write(sequence, step)
            if predicted := sequence.start.predicted(step):
                prompts[step.seq_id] = self._prompt_logprobs(sequence, step, predicted)
            if step.sample:
                sampled[step.seq_id] = self._sample(sequence, plan.masks.get(step.seq_id))
        if failing:
            raise RuntimeError(f"step {plan.step_id} was told to fail")
        return StepOutput(plan.step_id, sampled, failed, prompts)

    def _enter(self, plan: StepPlan) -> None:
        """Ends, freed blocks, copies, new blocks and starts, in this order."""
        for seq_id in plan.ends:
            ended = self._running.pop(seq_id, None)
            if ended is None:
                raise PlanError(f"sequence {seq_id} ends but is not running")
            self._hold(ended.table, -1)
        for block_id in plan.freed_block_ids:
            self._fresh(block_id)
        cell = CELL_BYTES
        for copy in plan.copies:
            src, dst = self.block_view(copy.src), self.block_view(copy.dst)
            self._fresh(copy.dst)
            dst[: copy.num_tokens * cell] = src[: copy.num_tokens * cell]
            self._fill[copy.dst] = copy.num_tokens
        for step in plan.steps:
            # Before the starts: one that comes later in the plan may read what the step writes.
            for block_id in step.new_block_ids:
                self._fresh(block_id)
        for start in plan.starts:
            if start.seq_id in self._running:
                raise PlanError(f"sequence {start.seq_id} starts but is running")
            covered = -(-start.num_cached_tokens // self._block_size)
            if covered > len(start.block_ids) or len(set(start.block_ids)) < len(start.block_ids):
                raise PlanError(f"sequence {start.seq_id} starts with a bad table")
            for block_id in start.block_ids[covered:]:
                self._fresh(block_id)
            self._running[start.seq_id] = _Running(start)
            self._hold(start.block_ids, 1)

    def _hold(self, block_ids: Sequence[int], change: int) -> None:
        """Count tables of running sequences that name a block."""
        for block_id in block_ids:
            self._holders[block_id] += change

    def _fresh(self, block_id: int) -> None:
        """Poison a block that nobody may be using."""
        if self._holders[block_id]:
            raise PlanError(f"block {block_id} is called free but is in a table")
        size = self.geometry.block_bytes
        self._memory[block_id * size : (block_id + 1) * size] = _POISON * size
        self._fill[block_id] = 0

    def _known(self, step: SequenceStep) -> _Running:
        """The sequence of a step, its table brought up to date."""
        sequence = self._running.get(step.seq_id)
        if sequence is None:
            raise PlanError(f"sequence {step.seq_id} has a step but did not start")
        sequence.table.extend(step.new_block_ids)
        self._hold(step.new_block_ids, 1)
        return sequence

    def _check(self, sequence: _Running, step: SequenceStep) -> None:
        """Check one step against the rules."""
        if not sequence.known:
            self._take_cached(sequence)
        end = step.start + len(step.token_ids)
        if step.start != sequence.num_computed or end == step.start:
            raise PlanError(
                f"sequence {step.seq_id} has {sequence.num_computed} tokens computed, "
                f"its step is {step.start} to {end}"
            )
        if end > len(sequence.table) * self._block_size or end > self.max_model_len:
            raise PlanError(f"sequence {step.seq_id} writes position {end - 1}, past its table")
        given = sequence.token_ids[step.start : end]
        if given != list(step.token_ids) and not _is_pending(step):
            raise PlanError(f"sequence {step.seq_id} is given other tokens than it has")
        if step.sample and end != len(sequence.token_ids):
            raise PlanError(f"sequence {step.seq_id} samples before its last token")

    def _take_cached(self, sequence: _Running) -> None:
        """At a sequence's first step: what it was given counts as written from here on.

        Not at its start, since an earlier step of the same plan may be what writes it.
        """
        full, rest = divmod(sequence.num_computed, self._block_size)
        for block_id in sequence.table[:full]:
            self._fill[block_id] = self._block_size
        if rest:
            tail = sequence.table[full]
            # One that starts in the same plan and comes later may read what is filled here.
            if self._holders[tail] > 1 and any(
                other.known and tail in other.table for other in self._running.values()
            ):
                raise PlanError(f"unfilled block {tail} is in two tables")
            size = self.geometry.block_bytes
            unfilled = self._memory[tail * size + rest * CELL_BYTES : (tail + 1) * size]
            unfilled[:] = _POISON * len(unfilled)
            self._fill[tail] = rest
        sequence.known = True

    def _slot(self, sequence: _Running, position: int) -> int:
        """Offset of a position's cell in memory."""
        block, slot = divmod(position, self._block_size)
        return (sequence.table[block] * self._block_size + slot) * CELL_BYTES

    def _state_before(self, sequence: _Running, position: int) -> int:
        """State before ``position``, from the cell before it as it is in memory."""
        if position == 0:
            return self._first_state
        at = self._slot(sequence, position - 1)
        cell = self._memory[at : at + CELL_BYTES]
        return crc32(cell, _state_of(cell))

    def _write(self, sequence: _Running, step: SequenceStep) -> None:
        state, end = self._state_before(sequence, step.start), step.start + len(step.token_ids)
        for position, token_id in enumerate(sequence.token_ids[step.start : end], step.start):
            self._claim(sequence, position)
            at = self._slot(sequence, position)
            cell = make_cell(state, token_id, position)
            self._memory[at : at + CELL_BYTES] = cell
            state = crc32(cell, state)
        sequence.num_computed = end

    def _skip(self, sequence: _Running, step: SequenceStep) -> None:
        """A failed step leaves garbage where its cells belong."""
        for position in range(step.start, step.start + len(step.token_ids)):
            self._claim(sequence, position)
            at = self._slot(sequence, position)
            self._memory[at : at + CELL_BYTES] = b"\xee" * CELL_BYTES
        sequence.num_computed = step.start + len(step.token_ids)

    def _claim(self, sequence: _Running, position: int) -> None:
        """A slot is written once in the life of a block's content."""
        block, slot = divmod(position, self._block_size)
        block_id = sequence.table[block]
        if slot != self._fill[block_id]:
            raise PlanError(
                f"slot {slot} of block {block_id} is written, its fill is {self._fill[block_id]}"
            )
        self._fill[block_id] = slot + 1

    def _read(self, sequence: _Running) -> int:
        """State over all cells of a sequence, from memory."""
        size, end = self._block_size, sequence.num_computed
        if not self._full_read:
            state = self._state_before(sequence, end)
            probe = _mix(state) % end
            at = self._slot(sequence, probe)
            found = bytes(self._memory[at : at + CELL_BYTES])
            right = make_cell(_state_of(found), sequence.token_ids[probe], probe)
            return state if found == right else state ^ crc32(found)
        state = self._first_state
        for i, block_id in enumerate(sequence.table[: -(-end // size)]):
            at = block_id * size * CELL_BYTES
            state = crc32(self._memory[at : at + min(size, end - i * size) * CELL_BYTES], state)
        return state

    def _prompt_logprobs(
        self, sequence: _Running, step: SequenceStep, predicted: Sequence[int]
    ) -> list[PromptLogprobs]:
        count = sequence.start.prompt_logprobs or 0
        found: list[PromptLogprobs] = []
        for position, token_id in enumerate(predicted, step.start + 1):
            state = self._state_before(sequence, position)
            fake = _fake_logprobs(state, token_id, self.vocab_size, count)
            found.append([(entry.token_id, entry.logprob) for entry in fake.logprobs])
        return found

    def _sample(self, sequence: _Running, mask: bytes | None) -> SampledToken:
        token = self._choose(sequence, None if mask is None else self._unpack(mask))
        sequence.token_ids.append(token.token_id)
        return token

    def _unpack(self, mask: bytes) -> list[int]:
        """Ids whose bits are set; those never sampled only where there are no others."""
        if len(mask) != -(-self.vocab_size // 32) * 4:
            raise PlanError(f"a mask of {self.vocab_size} tokens has {len(mask)} bytes")
        allowed = [i for i in range(self.vocab_size) if mask[i >> 3] >> (i & 7) & 1]
        if not allowed:
            raise PlanError("a mask allows no token")
        usual = [i for i in allowed if i not in self._vocabulary.never]
        return usual or allowed

    def _choose(self, sequence: _Running, allowed: Collection[int] | None) -> SampledToken:
        state, start = self._read(sequence), sequence.start
        # Scripts tell sequences by the list that is one for all their life, also when they start
        # again. The log of one that has ended may be another by now.
        known = start.token_ids
        if len(known) != len(sequence.token_ids):
            known = sequence.token_ids
        token_id = self._script(known) if self._script is not None else None
        if allowed is not None and token_id not in allowed:
            token_id = None
        if token_id is None and self._sampler is not None:
            logits = pseudo_logits(state, self._vocabulary)
            if allowed is not None:
                logits = [x if i in allowed else float("-inf") for i, x in enumerate(logits)]
            token_id = self._sampler(logits, start.sampling, known, start.num_prompt_tokens)
        if token_id is None:
            token_id = next_token(
                state,
                self._vocabulary,
                sampling=start.sampling,
                stop_token_ids=start.stop_token_ids,
                num_output_tokens=len(sequence.token_ids) - start.num_prompt_tokens,
                allowed=allowed,
            )
        if start.sampling.logprobs is None:
            return SampledToken(token_id)
        return _fake_logprobs(state, token_id, self.vocab_size, start.sampling.logprobs)
