"""Carries out step plans with a real model on a GPU.

Owns the pool of blocks, the decoder and a row of state for each running sequence. A step in which
every sequence computes one token is replayed from a CUDA graph of its size; any other runs the same
code eagerly. Used by the step loop's thread; movers copy extents on streams of their own, under
leases that keep plans away and behind fences (:mod:`sessionkv.engine.gpu.copier`).

Also runs with everything on the CPU under Triton's interpreter, which is how it is tested where
there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from sessionkv.engine.gpu.copier import GpuCopier
from sessionkv.engine.gpu.graphs import StepGraphs
from sessionkv.engine.gpu.inputs import StepInputs
from sessionkv.engine.gpu.results import StepResults
from sessionkv.engine.runner import LaterResult
from sessionkv.kernels.block_copies import copy_block_slots
from sessionkv.kernels.sampling import sample_tokens
from sessionkv.model.gpu_decoder import GpuDecoder
from sessionkv.model.sampling import SamplerState, sample
from sessionkv.types import (
    BlockCopy,
    KVGeometry,
    SampledToken,
    SequenceStart,
    SequenceStep,
    StepOutput,
    StepPlan,
)

_NOT_FINITE = "the model's output is not a finite number"


class GpuRunner:
    """A :class:`~sessionkv.engine.runner.Runner` over a decoder on a GPU."""

    def __init__(
        self,
        decoder: GpuDecoder,
        *,
        fingerprint: str,
        geometry: KVGeometry,
        num_blocks: int,
        max_model_len: int,
        max_step_tokens: int,
        max_running: int,
        device: torch.device,
    ) -> None:
        """Allocate the pool and what steps need.

        Args:
            decoder: Loaded; on ``device``.
            fingerprint: See :class:`~sessionkv.engine.runner.Runner`.
            geometry: Of a block; its dtype is the weights'.
            num_blocks: Blocks of the pool.
            max_model_len: Most positions of one sequence.
            max_step_tokens: No plan has more tokens.
            max_running: No more sequences are in the batch at once.
            device: A CUDA device, or the CPU for tests.
        """
        spec = decoder.spec
        self.geometry, self.num_blocks = geometry, num_blocks
        self.vocab_size, self.max_model_len = spec.vocab_size, max_model_len
        self.fingerprint, self.weights_bytes = fingerprint, decoder.weights_bytes
        self._decoder, self._device = decoder, device
        shape = (spec.num_layers, 2, spec.num_kv_heads, geometry.block_size, spec.head_dim)
        dtype = getattr(torch, geometry.dtype)
        self.pool = torch.zeros((num_blocks, *shape), dtype=dtype, device=device)
        self._inputs = StepInputs(
            block_size=geometry.block_size,
            max_model_len=max_model_len,
            max_step_tokens=max_step_tokens,
            max_running=max_running,
            device=device,
        )
        self._results = StepResults(
            max_running,
            max_step_tokens=max_step_tokens,
            vocab_size=spec.vocab_size,
            dtype=dtype,
            device=device,
        )
        self.graphs = StepGraphs(self._decode, max_running, device)
        self._samplers: dict[int, SamplerState] = {}
        self.memory = GpuCopier(self.pool)

    @property
    def pool_bytes(self) -> int:
        """Memory of the pool."""
        return self.pool.nbytes

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Compile kernels and capture the graphs; ``progress`` is told how many of how many."""
        with torch.inference_mode():
            self.graphs.capture(progress)

    def close(self) -> None:
        """Let go of the model, the graphs and the pool."""
        self._samplers.clear()
        self.memory.close()
        del self.graphs, self._decoder, self.pool, self._results

    plans_ahead = False

    def launch(self, plan: StepPlan) -> LaterResult:
        """See :class:`~sessionkv.engine.runner.Runner`."""
        return LaterResult(partial(self.execute, plan))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """Carry out one plan; see :class:`~sessionkv.engine.runner.Runner`."""
        for seq_id in plan.ends:
            self._inputs.rows.end(seq_id)
            self._samplers.pop(seq_id, None)
        self._copy(plan.copies)
        for start in plan.starts:
            self._start(start)
        if not plan.steps:
            return StepOutput(plan.step_id)
        decodes = [step for step in plan.steps if len(step.token_ids) == 1]
        prefills = [step for step in plan.steps if len(step.token_ids) > 1]
        steps = [*decodes, *prefills]
        samples = [index for index, step in enumerate(steps) if step.sample]
        if not prefills and len(samples) == len(steps):
            size = self.graphs.size_for(len(steps))
            self._inputs.fill_decodes(steps, size)
            self.graphs.run(size)
        else:
            self._compute_mixed(decodes, prefills, len(samples))
        return self._finish(plan, steps, samples)

    # -- computing --------------------------------------------------------------------------------

    def _decode(self, num_rows: int) -> None:
        """One token of each row, sampled: what a graph holds."""
        hidden = self._decoder.forward(self._inputs.decodes(num_rows), self.pool)
        self._results.put_unusable(hidden)
        self._sample(hidden)

    def _compute_mixed(
        self,
        decodes: Sequence[SequenceStep],
        prefills: Sequence[SequenceStep],
        num_samples: int,
    ) -> None:
        batch = self._inputs.fill_mixed(decodes, prefills)
        hidden = self._decoder.forward(batch, self.pool)
        self._results.put_unusable(hidden)
        if num_samples:
            self._sample(hidden[self._inputs.sampled(num_samples)])

    def _sample(self, hidden: Tensor) -> None:
        num_rows = hidden.shape[0]
        logits = self._decoder.logits(hidden, out=self._results.logits[:num_rows])
        self._results.put_sampled(*sample_tokens(logits, self._inputs.sampling(num_rows)))

    # -- sequences --------------------------------------------------------------------------------

    def _start(self, start: SequenceStart) -> None:
        self._inputs.rows.start(start)
        sampler = SamplerState(
            start.sampling,
            token_ids=start.token_ids,
            num_prompt_tokens=start.num_prompt_tokens,
            stop_token_ids=start.stop_token_ids,
            vocab_size=self.vocab_size,
        )
        if sampler.has_state:
            self._samplers[start.seq_id] = sampler

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        if copies:
            rows = [(copy.src, copy.dst, copy.num_tokens) for copy in copies]
            copy_block_slots(self.pool, torch.tensor(rows, device=self._device))

    # -- results ----------------------------------------------------------------------------------

    def _finish(
        self, plan: StepPlan, steps: Sequence[SequenceStep], samples: Sequence[int]
    ) -> StepOutput:
        """Wait for the step; which sequences have no usable result, what the others sampled."""
        num_tokens = sum(len(step.token_ids) for step in steps)
        unusable, token_ids, bad_rows = self._results.fetch(num_tokens, len(samples))
        failed: dict[int, str] = {}
        if unusable.any():
            end = 0
            for step in steps:
                start, end = end, end + len(step.token_ids)
                if unusable[start:end].any():
                    failed[step.seq_id] = _NOT_FINITE
        sampled: dict[int, SampledToken] = {}
        for row, index in enumerate(samples):
            seq_id = steps[index].seq_id
            if bad_rows[row]:
                failed[seq_id] = _NOT_FINITE
            elif seq_id not in failed:
                token = SampledToken(token_ids[row])
                if seq_id in self._samplers:
                    token = self._sample_with_state(seq_id, row)
                self._inputs.rows.sampled(seq_id)
                sampled[seq_id] = token
        return StepOutput(plan.step_id, sampled, failed)

    def _sample_with_state(self, seq_id: int, row: int) -> SampledToken:
        """Sample what depends on more than logits and parameters, such as penalties."""
        sampler = self._samplers[seq_id]
        token = sample(self._results.logits[row].float().cpu(), sampler)
        sampler.append(token.token_id)
        return token
