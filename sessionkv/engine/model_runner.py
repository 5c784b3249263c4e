"""Carries out step plans with a real model on the CPU.

Owns the pool of blocks, the decoder, and for each running sequence its block table, its mirror and
its sampling state. The pool is the truth: every token's KV is in its slot before anything reads
it, and movers copy extents straight from it. Used by the step loop's thread; only
:meth:`ModelRunner.block_view` bytes are touched by movers, under leases that keep plans away.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from sessionkv.config import torch_threads_wait_asleep
from sessionkv.engine.device_memory import HostPool
from sessionkv.engine.runner import LaterResult
from sessionkv.engine.sizing import memory_for
from sessionkv.errors import ConfigError, SessionKVError
from sessionkv.kernels.linear import blas_is_faster
from sessionkv.kernels.logprobs import log_probabilities
from sessionkv.kernels.paged_kv import copy_slots
from sessionkv.model.attention import AttentionBatch, make_segment
from sessionkv.model.decoder import Decoder
from sessionkv.model.mirror import Mirror, MirrorPool
from sessionkv.model.prepare import PreparedModel
from sessionkv.model.sampling import SamplerState, sample
from sessionkv.model.spec import ModelSpec
from sessionkv.model.weights import WeightFiles
from sessionkv.types import PENDING, SampledToken, SequenceStart, SequenceStep, StepOutput, StepPlan
from sessionkv.types.plan import PromptLogprobs

NUMERICS = "cpu fp32 3"
"""Names the arithmetic, with the way of its products; to be changed whenever the same weights give
other KV bytes."""

_ROWS_AT_ONCE = 64
"""Of prompts' logits, which take about 40 bytes each: 130 MB of a vocabulary of 50,000."""
_NOT_FINITE = "the model's output is not a finite number"


class _Sequence:
    """What the runner keeps of one running sequence."""

    __slots__ = ("block_table", "last_token", "mirror", "sampler", "start")

    def __init__(self, start: SequenceStart, mirror: Mirror | None, sampler: SamplerState) -> None:
        self.start = start
        self.block_table = list(start.block_ids)
        self.mirror = mirror
        self.sampler = sampler
        self.last_token = 0  # sampled last


class ModelRunner:
    """A :class:`~sessionkv.engine.runner.Runner` over a prepared model, fp32 on the CPU.

    Attributes:
        plans_ahead: False: the processor that computes is the one that plans.
    """

    plans_ahead = False

    def __init__(
        self,
        prepared: PreparedModel,
        *,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        threads: int | None,
        mirror_bytes: int,
    ) -> None:
        """Load the weights and reserve the pool (its memory is taken as blocks are written).

        Args:
            prepared: Model folder, checked.
            block_size: Tokens a block.
            num_blocks: Blocks of the pool.
            max_model_len: Most positions of one sequence, at most the model's own.
            threads: Compute threads of this process; None leaves torch's choice.
            mirror_bytes: Most memory for contiguous copies of running sequences.

        Raises:
            ModelBroken: A file is missing or damaged.
            ConfigError: The maximum length is beyond the model's, or the system does not give the
                pool its memory.
        """
        spec = prepared.spec
        if max_model_len > spec.max_model_len:
            raise ConfigError("max_model_len", max_model_len, f"at most {spec.max_model_len}")
        if threads is not None:
            torch.set_num_threads(threads)
        self.geometry = spec.kv_geometry(block_size)
        self.num_blocks = num_blocks
        self.vocab_size = spec.vocab_size
        self.max_model_len = max_model_len
        blas = blas_is_faster(threads_wait_asleep=torch_threads_wait_asleep())
        numerics = f"{NUMERICS} {'blas' if blas else 'packed'}"
        self.fingerprint = kv_fingerprint(spec, prepared.fingerprint, numerics=numerics)
        files = WeightFiles(prepared.folder, spec)
        self._decoder = Decoder(spec, files, max_model_len=max_model_len, blas=blas)
        self.weights_bytes = self._decoder.nbytes
        pool_bytes = num_blocks * self.geometry.block_bytes
        with memory_for("cache.device_bytes", pool_bytes):
            self._memory = memoryview(_reserve(pool_bytes))
        self._pool: Tensor = torch.frombuffer(self._memory, dtype=torch.float32).view(
            num_blocks, spec.num_layers, 2, spec.num_kv_heads, block_size, spec.head_dim
        )
        self._mirrors = MirrorPool(
            num_layers=spec.num_layers,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            max_tokens=max_model_len,
            budget_bytes=mirror_bytes,
        )
        self._windows = tuple(dict.fromkeys(spec.windows))
        self._sequences: dict[int, _Sequence] = {}

    @property
    def pool_bytes(self) -> int:
        """Memory of the pool, and of the mirrors with what is kept for the next ones."""
        return len(self._memory) + self._mirrors.held_bytes

    def block_view(self, block_id: int) -> memoryview:
        """Writable bytes of one block's extent, valid for the life of the runner."""
        size = self.geometry.block_bytes
        return self._memory[block_id * size : (block_id + 1) * size]

    @property
    def memory(self) -> HostPool:
        """See :class:`~sessionkv.engine.runner.Runner`."""
        return HostPool(self.block_view)

    def close(self) -> None:
        """Let go of the model and the pool; the pool's memory goes with the last block view."""
        self._sequences.clear()
        del self._decoder, self._pool, self._memory

    def prepare_thread(self) -> None:
        """Nothing: no thread has anything for itself."""

    def launch(self, plan: StepPlan) -> LaterResult:
        """See :class:`~sessionkv.engine.runner.Runner`."""
        return LaterResult(partial(self.execute, plan))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """Carry out one plan; raises as :class:`~sessionkv.engine.runner.LaunchedStep` does."""
        for seq_id in plan.ends:
            self._end(seq_id)
        for copy in plan.copies:
            copy_slots(self._pool, src=copy.src, dst=copy.dst, num_tokens=copy.num_tokens)
        for start in plan.starts:
            self._start(start)
        if not plan.steps:
            return StepOutput(plan.step_id)
        token_ids = [token for step in plan.steps for token in self._tokens(step)]
        batch = self._batch(plan.steps)
        hidden = self._decoder.forward(
            torch.tensor(token_ids, dtype=torch.int64), pool=self._pool, batch=batch
        )
        for segment in batch.segments:
            if segment.mirror is not None:
                segment.mirror.num_tokens = segment.end
        return self._finish(plan, hidden)

    def _start(self, start: SequenceStart) -> None:
        if start.seq_id in self._sequences:
            raise SessionKVError(f"sequence {start.seq_id} is in the batch already")
        sampler = SamplerState(
            start.sampling,
            token_ids=start.token_ids,
            num_prompt_tokens=start.num_prompt_tokens,
            stop_token_ids=start.stop_token_ids,
            vocab_size=self.vocab_size,
        )
        mirror = self._mirrors.create(len(start.token_ids) + 1)
        self._sequences[start.seq_id] = _Sequence(start, mirror, sampler)

    def _tokens(self, step: SequenceStep) -> Sequence[int]:
        if step.token_ids[0] == PENDING:
            return (self._sequences[step.seq_id].last_token,)
        return step.token_ids

    def _end(self, seq_id: int) -> None:
        """Forget a sequence; one whose start failed is not known, which is fine."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None and sequence.mirror is not None:
            self._mirrors.release(sequence.mirror)

    def _batch(self, steps: Sequence[SequenceStep]) -> AttentionBatch:
        """Slots of all new tokens, and each sequence's part, with room in its mirror."""
        block_size = self.geometry.block_size
        positions: list[int] = []
        block_ids: list[int] = []
        segments = []
        for step in steps:
            sequence = self._sequences[step.seq_id]
            sequence.block_table.extend(step.new_block_ids)
            table, end = sequence.block_table, step.start + len(step.token_ids)
            if sequence.mirror is not None and not self._mirrors.grow(sequence.mirror, end):
                self._mirrors.release(sequence.mirror)
                sequence.mirror = None
            segments.append(
                make_segment(
                    row=len(positions),
                    num_rows=end - step.start,
                    start=step.start,
                    block_table=table,
                    mirror=sequence.mirror,
                    block_size=block_size,
                    windows=self._windows,
                )
            )
            positions.extend(range(step.start, end))
            block_ids.extend(table[p // block_size] for p in range(step.start, end))
        at = torch.tensor(positions, dtype=torch.int64)
        return AttentionBatch(
            positions=at,
            block_ids=torch.tensor(block_ids, dtype=torch.int64),
            slots=at % block_size,
            segments=segments,
        )

    def _finish(self, plan: StepPlan, hidden: Tensor) -> StepOutput:
        """Find sequences whose result is unusable, sample for the others that ask for it."""
        failed: dict[int, str] = {}
        finite = hidden.sum(1).isfinite()  # a bad number anywhere in a row makes its sum bad
        all_finite = bool(finite.all())
        sampling: list[tuple[int, int]] = []
        prompts: dict[int, list[PromptLogprobs]] = {}
        row = 0
        for step in plan.steps:
            end = row + len(step.token_ids)
            if not all_finite and not bool(finite[row:end].all()):
                failed[step.seq_id] = _NOT_FINITE
                row = end
                continue
            start = self._sequences[step.seq_id].start
            if predicted := start.predicted(step):
                rows = hidden[row : row + len(predicted)]
                count = start.prompt_logprobs or 0
                prompts[step.seq_id] = self._prompt_logprobs(rows, predicted, count)
            if step.sample:
                sampling.append((step.seq_id, end - 1))
            row = end
        sampled = self._sample(sampling, hidden, plan.masks, failed) if sampling else {}
        return StepOutput(plan.step_id, sampled, failed, prompts)

    def _prompt_logprobs(
        self, hidden: Tensor, predicted: Sequence[int], count: int
    ) -> list[PromptLogprobs]:
        """Of the tokens that rows of hidden states predict, some rows at a time."""
        found: list[PromptLogprobs] = []
        for first in range(0, len(predicted), _ROWS_AT_ONCE):
            some = torch.tensor(predicted[first : first + _ROWS_AT_ONCE], dtype=torch.int64)
            logits = self._decoder.logits(hidden[first : first + len(some)])
            ids, values = log_probabilities(logits, some, min(count, self.vocab_size))
            found += map(list, map(zip, ids.tolist(), values.tolist()))
        return found

    def _sample(
        self,
        sampling: list[tuple[int, int]],
        hidden: Tensor,
        masks: Mapping[int, bytes],
        failed: dict[int, str],
    ) -> dict[int, SampledToken]:
        """One token for each ``(seq_id, row)``; rows with bad logits are added to ``failed``."""
        rows = torch.tensor([row for _, row in sampling], dtype=torch.int64)
        logits = self._decoder.logits(hidden[rows])
        largest = logits.max(dim=1)
        finite, best = largest.values.isfinite().tolist(), largest.indices.tolist()
        sampled: dict[int, SampledToken] = {}
        for index, (seq_id, _) in enumerate(sampling):
            if not finite[index]:
                failed[seq_id] = _NOT_FINITE
                continue
            sequence = self._sequences[seq_id]
            sampler, mask = sequence.sampler, masks.get(seq_id)
            if sampler.is_plain_greedy and mask is None:
                token = SampledToken(best[index])
            else:
                token = sample(logits[index], sampler, mask)
            sampler.append(token.token_id)
            sequence.last_token = token.token_id
            sampled[seq_id] = token
        return sampled


def kv_fingerprint(spec: ModelSpec, weights_fingerprint: str, *, numerics: str) -> str:
    """Digest of everything of a model that changes KV bytes: weights, settings, arithmetic."""
    settings = asdict(spec)
    del settings["max_model_len"]  # a limit, which no number depends on
    text = json.dumps([weights_fingerprint, numerics, settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _reserve(num_bytes: int) -> mmap.mmap:
    """Zeroed page-aligned memory, taken from the system page by page as it is written."""
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
