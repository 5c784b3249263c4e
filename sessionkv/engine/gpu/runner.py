"""Carries out step plans with a real model on a GPU.

Owns the pool of blocks, the decoder and a row of state for each running sequence. A step in which
every sequence computes one token is replayed from a CUDA graph of its size, and so is any other
small one; large ones run the same code eagerly. Used by the step loop's thread; movers copy extents
on streams of their own, under leases that keep plans away and behind fences
(:mod:`sessionkv.engine.gpu.copier`).

Also runs with everything on the CPU under Triton's interpreter, which is how it is tested where
there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from sessionkv.engine.gpu.copier import GpuCopier
from sessionkv.engine.gpu.graphs import (
    ChunkSize,
    StepGraphs,
    chunk_size_for,
    chunk_sizes,
    graph_sizes,
    most_chunk_rows,
    size_for,
)
from sessionkv.engine.gpu.inputs import StepInputs
from sessionkv.engine.gpu.prompt_logprobs import PromptScorer
from sessionkv.engine.gpu.results import FetchedResults, StepResults
from sessionkv.engine.gpu.sampling import ExtraSampling
from sessionkv.engine.runner import LaterResult
from sessionkv.kernels.block_copies import copy_block_slots
from sessionkv.kernels.sampling import sample_tokens
from sessionkv.model.gpu_decoder import GpuDecoder
from sessionkv.types import (
    BlockCopy,
    KVGeometry,
    SampledToken,
    SequenceStep,
    StepOutput,
    StepPlan,
    TokenLogprob,
)
from sessionkv.types.plan import PromptLogprobs

_NOT_FINITE = "the model's output is not a finite number"


class GpuRunner:
    """A :class:`~sessionkv.engine.runner.Runner` over a decoder on a GPU.

    A plan made ahead finds its tokens where the step before leaves them, on the device: nothing of
    a step but its results goes through the host.

    Attributes:
        plans_ahead: True: while the device computes, the host plans.
        small_step_tokens: Steps of up to so many tokens are graphs, which cost the host little.
    """

    plans_ahead = True

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
        self.small_step_tokens = most_chunk_rows(decoder.layer_weights, max_step_tokens)
        chunks = chunk_sizes(self.small_step_tokens, max_running)
        max_rows = max(max_step_tokens, *(size.total_rows for size in chunks))
        self._inputs = StepInputs(
            block_size=geometry.block_size,
            max_model_len=max_model_len,
            max_rows=max_rows,
            max_running=max_running,
            chunks=chunks,
            device=device,
        )
        self._results = StepResults(
            max_running,
            max_rows=max_rows,
            vocab_size=spec.vocab_size,
            dtype=dtype,
            device=device,
        )
        self.graphs = StepGraphs(self._decode, graph_sizes(max_running), device)
        self._chunks = StepGraphs(self._compute_chunk, chunks, device)
        self._max_running = max_running
        self._extras = ExtraSampling(max_running, vocab_size=spec.vocab_size, device=device)
        self._prompts = PromptScorer(decoder, device)
        self._sampled_last: dict[int, int] = {}  # where, by seq_id, the last step leaves a token
        self.memory = GpuCopier(self.pool)

    @property
    def pool_bytes(self) -> int:
        """Memory of the pool."""
        return self.pool.nbytes

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Compile kernels and capture the graphs; ``progress`` is told how many of how many."""
        with torch.inference_mode():
            self._copy([BlockCopy(0, 0, 1)])  # to itself
            total = len(self.graphs.sizes) + len(self._chunks.sizes)
            self._chunks.capture(lambda done: progress(done, total))
            done_before = len(self._chunks.sizes)
            self.graphs.capture(lambda done: progress(done_before + done, total))

    @torch.inference_mode()
    def prepare_thread(self) -> None:
        """See :class:`~sessionkv.engine.runner.Runner`: handles and plans of libraries.

        Before any plan, as the step that is run for them leaves numbers in the pool.
        """
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread starts with the first GPU
            self._decoder.plan_calls()
            self._compute_chunk(self._chunks.sizes[0])
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Let go of the model, the graphs and the pool."""
        self.memory.close()
        del (
            self.graphs,
            self._chunks,
            self._decoder,
            self.pool,
            self._inputs,
            self._results,
            self._extras,
            self._prompts,
        )

    def execute(self, plan: StepPlan) -> StepOutput:
        """Launch one plan and wait for it."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaterResult:
        """See :class:`~sessionkv.engine.runner.Runner`; waits for nothing on the device.

        But for uploads that are rare: of starts, copies, and changes of what is sampled otherwise.
        """
        self._results.begin()
        for seq_id in plan.ends:
            self._inputs.rows.end(seq_id)
            self._extras.end(seq_id)
            self._prompts.end(seq_id)
        self._copy(plan.copies)
        for start in plan.starts:
            self._inputs.rows.start(start)
            self._extras.start(start)
            self._prompts.start(start)
        if not plan.steps:
            return LaterResult(partial(StepOutput, plan.step_id))
        try:
            return self._enqueue(plan)
        except Exception:
            # What was enqueued reads buffers that a step to come writes, and nobody waits for it.
            if self._device.type == "cuda":
                with suppress(RuntimeError):
                    torch.cuda.synchronize(self._device)
            raise

    def _enqueue(self, plan: StepPlan) -> LaterResult:
        """Everything of a step, from its inputs to the copy of its results."""
        decodes = [step for step in plan.steps if len(step.token_ids) == 1]
        prefills = [step for step in plan.steps if len(step.token_ids) > 1]
        steps = [*decodes, *prefills]
        seq_ids = [step.seq_id for step in steps if step.sample]
        extra = self._extras.prepare(seq_ids, plan.masks)
        first = len(decodes)  # row of the first prefill
        predicted = self._prompts.predicted(steps)
        prompts: Callable[[], dict[int, list[PromptLogprobs]]] = dict
        if predicted:
            hidden = self._compute_all_rows(decodes, prefills, len(seq_ids))
            prompts = self._prompts.launch(hidden, predicted, _first_rows(steps))
        elif not prefills and len(seq_ids) == len(steps):
            size = size_for(self.graphs.sizes, len(steps))
            if plan.is_ahead:
                sources = [self._sampled_last[seq_id] for seq_id in seq_ids]
                self._inputs.fill_ahead(
                    steps, size, sources=sources, token_ids=self._results.token_ids
                )
            else:
                self._inputs.fill_decodes(steps, size)
            self.graphs.run(size)
        elif chunk := self._chunk_size(decodes, prefills):
            if chunk.num_decodes:
                first = chunk.num_decodes
                self._inputs.fill_chunk(decodes, prefills, chunk)
            else:
                self._inputs.fill_chunk((), steps, chunk)
            self._chunks.run(chunk)
        else:
            self._compute_mixed(decodes, prefills, len(seq_ids))
        wanted: Mapping[int, int] = {}
        if extra is not None:
            self._extras.sample(
                extra,
                self._results.logits,
                sampling=self._inputs.sampling(len(seq_ids)),
                results=self._results,
            )
            wanted = extra.num_likeliest
        self._sampled_last = {seq_id: row for row, seq_id in enumerate(seq_ids)}
        num_rows = first + sum(len(step.token_ids) for step in prefills)
        fetch = self._results.send(num_rows, num_samples=len(seq_ids), num_asked=len(wanted))

        def result() -> StepOutput:
            fetched = fetch()
            failed = _failed(decodes, prefills, first, fetched)
            sampled = _sampled(seq_ids, fetched, wanted, failed)
            return StepOutput(
                plan.step_id, sampled, failed, prompts(), computed_s=fetched.computed_s
            )

        return LaterResult(result)

    # -- computing --------------------------------------------------------------------------------

    def _decode(self, num_rows: int) -> None:
        """One token of each row, sampled: what a graph holds."""
        hidden, checked = self._decoder.forward(self._inputs.decodes(num_rows), self.pool)
        self._results.put_unusable(checked)
        self._sample(hidden)

    def _compute_chunk(self, size: ChunkSize) -> None:
        """Any tokens of each sequence, a token sampled of each: what another graph holds."""
        hidden, checked = self._decoder.forward(self._inputs.chunk(size), self.pool)
        self._results.put_unusable(checked)
        num_samples = min(size.num_decodes + size.num_sequences, self._max_running)
        self._sample(hidden[self._inputs.sampled(num_samples)])

    def _chunk_size(
        self, decodes: Sequence[SequenceStep], prefills: Sequence[SequenceStep]
    ) -> ChunkSize | None:
        num_rows = sum(len(step.token_ids) for step in prefills)
        return chunk_size_for(self._chunks.sizes, len(decodes), num_rows, len(prefills))

    def _compute_mixed(
        self,
        decodes: Sequence[SequenceStep],
        prefills: Sequence[SequenceStep],
        num_samples: int,
    ) -> None:
        batch = self._inputs.fill_mixed(decodes, prefills)
        hidden, checked = self._decoder.forward(batch, self.pool)
        self._results.put_unusable(checked)
        if num_samples:
            self._sample(hidden)

    def _compute_all_rows(
        self,
        decodes: Sequence[SequenceStep],
        prefills: Sequence[SequenceStep],
        num_samples: int,
    ) -> Tensor:
        """As the others, with the last layer of all rows; their hidden states."""
        batch = replace(self._inputs.fill_mixed(decodes, prefills), sampled=None)
        hidden, checked = self._decoder.forward(batch, self.pool)
        self._results.put_unusable(checked)
        if num_samples:
            self._sample(hidden[self._inputs.sampled(num_samples)])
        return hidden

    def _sample(self, hidden: Tensor) -> None:
        num_rows = hidden.shape[0]
        logits = self._decoder.logits(hidden, out=self._results.logits[:num_rows])
        self._results.put_sampled(*sample_tokens(logits, self._inputs.sampling(num_rows)))

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        if copies:
            rows = [(copy.src, copy.dst, copy.num_tokens) for copy in copies]
            copy_block_slots(self.pool, torch.tensor(rows, device=self._device))


def _first_rows(steps: Sequence[SequenceStep]) -> dict[int, int]:
    """Where each sequence's rows begin, where there is no padding between them."""
    rows = accumulate((len(step.token_ids) for step in steps), initial=0)
    return {step.seq_id: row for step, row in zip(steps, rows, strict=False)}


def _failed(
    decodes: Sequence[SequenceStep],
    prefills: Sequence[SequenceStep],
    first: int,
    fetched: FetchedResults,
) -> dict[int, str]:
    """Sequences without a usable result, with the reason.

    Args:
        decodes: A row each, from the first on.
        prefills: Their rows begin at ``first``, in their order.
        first: See ``prefills``.
        fetched: What the step left.
    """
    failed: dict[int, str] = {}
    if fetched.unusable.any():
        rows = fetched.unusable.tolist()
        failed |= {
            step.seq_id: _NOT_FINITE for step, bad in zip(decodes, rows, strict=False) if bad
        }
        end = first
        for step in prefills:
            start, end = end, end + len(step.token_ids)
            if any(rows[start:end]):
                failed[step.seq_id] = _NOT_FINITE
    if any(fetched.bad):
        samples = (step.seq_id for step in [*decodes, *prefills] if step.sample)
        bad = (seq_id for seq_id, is_bad in zip(samples, fetched.bad, strict=True) if is_bad)
        failed |= dict.fromkeys(bad, _NOT_FINITE)
    return failed


def _sampled(
    seq_ids: Sequence[int],
    fetched: FetchedResults,
    wanted: Mapping[int, int],
    failed: Mapping[int, str],
) -> dict[int, SampledToken]:
    """The tokens of those that have not failed; ``wanted`` as in :class:`ExtraRows`."""
    logprobs = {
        row: tuple(map(TokenLogprob, ids[: 1 + count], values))
        for (row, count), ids, values in zip(
            wanted.items(), fetched.logprob_ids, fetched.logprobs, strict=True
        )
    }
    return {
        seq_id: SampledToken(fetched.token_ids[row], logprobs.get(row, ()))
        for row, seq_id in enumerate(seq_ids)
        if seq_id not in failed
    }
