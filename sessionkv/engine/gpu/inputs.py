"""From the steps of a plan to the tensors that the decoder and the sampler read.

Rows of a batch are ordered: sequences that compute one token, then those that compute more. All
tensors are parts of buffers at fixed addresses, so that what was captured in a graph reads the
values of the step at hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sessionkv.engine.gpu.buffers import IntArray, StepBuffers
from sessionkv.engine.gpu.graphs import ChunkSize
from sessionkv.engine.gpu.rows import SequenceRows
from sessionkv.kernels.sampling import SamplingRows
from sessionkv.model.gpu_batch import DecodeRows, GpuBatch, PrefillRows, SampledRows
from sessionkv.types import SequenceStep

_PER_TOKEN = ("token_ids", "positions", "slots")
_PER_SAMPLE = {
    "temperature": "float32",
    "top_k": "int32",
    "top_p": "float32",
    "min_p": "float32",
    "seed": "int64",
    "index": "int64",
}


class StepInputs:
    """The step loop's thread only.

    Attributes:
        rows: State of the running sequences.
    """

    def __init__(
        self,
        *,
        block_size: int,
        max_model_len: int,
        max_rows: int,
        max_running: int,
        chunks: Sequence[ChunkSize],
        device: torch.device,
    ) -> None:
        """Allocate.

        Args:
            block_size: Positions of a block.
            max_model_len: Most positions of one sequence.
            max_rows: Most rows of a step, padding included.
            max_running: Most sequences at once.
            chunks: Sizes of chunks.
            device: Where kernels run.
        """
        max_blocks = -(-max_model_len // block_size)
        # With the padding between those that decode and the others.
        most = max(max_running, *(size.num_decodes + size.num_sequences for size in chunks))
        self.rows = SequenceRows(max_running, max_blocks)
        self._block_size, self._max_model_len = block_size, max_model_len
        # Small steps should not upload what only large ones use.
        self._one_each, self._many = (
            StepBuffers({name: ("int64", (count,)) for name in _PER_TOKEN}, device)
            for count in (max_running, max_rows)
        )
        arrays = {name: (dtype, (max_running,)) for name, dtype in _PER_SAMPLE.items()}
        arrays["sampled"] = ("int64", (max_running,))
        arrays["sources"] = ("int64", (max_running,))
        arrays["seq_lens"] = ("int32", (most,))
        arrays["query_starts"] = ("int32", (most + 1,))
        self._per_sequence = StepBuffers(arrays, device)
        # Uploaded without gaps, then spread to where rows have their fixed places.
        self._packed = StepBuffers({"tables": ("int32", (max_running * max_blocks,))}, device)
        self._tables = torch.zeros((most, max_blocks), dtype=torch.int32, device=device)

    # -- one token a sequence ---------------------------------------------------------------------

    def fill_decodes(self, steps: Sequence[SequenceStep], num_rows: int) -> None:
        """Upload steps of one token each, with padding rows up to ``num_rows``."""
        self._turn()
        self._fill_decodes(steps, num_rows)

    def fill_ahead(
        self,
        steps: Sequence[SequenceStep],
        num_rows: int,
        *,
        sources: Sequence[int],
        token_ids: Tensor,
    ) -> None:
        """As :meth:`fill_decodes`, where the tokens are known to the device alone.

        Args:
            steps: Of a plan that was made ahead.
            num_rows: With padding.
            sources: For each step, which of ``token_ids`` it computes.
            token_ids: int64, on the device: what the step before samples. Read when all that was
                launched so far is done.
        """
        self._turn()
        count = len(steps)
        self._per_sequence.host["sources"][:count] = sources
        self._fill_decodes(steps, num_rows)
        found = self._per_sequence.device["sources"][:count]
        torch.index_select(token_ids, 0, found, out=self._one_each.device["token_ids"][:count])

    def _fill_decodes(self, steps: Sequence[SequenceStep], num_rows: int) -> None:
        rows = self._grow_tables(steps)
        count = len(rows)
        self._put_decodes(self._one_each.host, steps, rows)
        self._one_each.host["slots"][count:num_rows] = -1
        self._per_sequence.host["seq_lens"][count:num_rows] = 0
        self._put_sampling(rows)
        self._put_tables(rows, steps, count, count)
        self._one_each.upload()
        self._per_sequence.upload()

    def decodes(self, num_rows: int) -> GpuBatch:
        """What :meth:`fill_decodes` uploads for so many rows."""
        per_token = self._one_each.device
        lens = self._per_sequence.device["seq_lens"][:num_rows]
        tables = self._tables[:num_rows]
        decode = DecodeRows(tables, lens, self._max_model_len)
        return _batch(per_token, num_rows, decode, None)

    def sampling(self, num_rows: int) -> SamplingRows:
        """How the rows sample that were last uploaded, in their order."""
        per_row = self._per_sequence.device
        return SamplingRows(**{name: per_row[name][:num_rows] for name in _PER_SAMPLE})

    # -- any number of tokens a sequence ----------------------------------------------------------

    def fill_mixed(
        self, decodes: Sequence[SequenceStep], prefills: Sequence[SequenceStep]
    ) -> GpuBatch:
        """Upload steps of one token, then of several."""
        self._turn()
        self._fill_mixed(decodes, prefills, len(decodes))
        return self._mixed(decodes, prefills)

    def _fill_mixed(
        self, decodes: Sequence[SequenceStep], prefills: Sequence[SequenceStep], first: int
    ) -> None:
        """``first``: of rows and sequences, where those of ``prefills`` begin."""
        steps = [*decodes, *prefills]
        rows = self._grow_tables(steps)
        num_decodes, host = len(decodes), self._many.host
        self._put_decodes(host, decodes, rows[:num_decodes])
        per_sequence = self._per_sequence.host
        end, last_rows = first, list(range(num_decodes))
        for number, step in enumerate(prefills):
            part = slice(end, end + len(step.token_ids))
            positions = np.arange(step.start, step.start + len(step.token_ids))
            host["token_ids"][part] = step.token_ids
            host["positions"][part] = positions
            host["slots"][part] = self._slots(rows[num_decodes + number], positions)
            per_sequence["query_starts"][number] = end - first
            per_sequence["seq_lens"][first + number] = positions[-1] + 1
            end = part.stop
            last_rows.append(end - 1)
        per_sequence["query_starts"][len(prefills)] = end - first
        samples = [index for index, step in enumerate(steps) if step.sample]
        per_sequence["sources"][: len(samples)] = samples
        per_sequence["sampled"][: len(samples)] = [last_rows[index] for index in samples]
        self._put_sampling(rows[samples])
        self._put_tables(rows, steps, num_decodes, first)
        self._many.upload()
        self._per_sequence.upload()

    def fill_chunk(
        self,
        decodes: Sequence[SequenceStep],
        prefills: Sequence[SequenceStep],
        size: ChunkSize,
    ) -> None:
        """Upload steps of one token, then of any lengths, each padded to what the size has.

        ::

            | decodes | padding | prefills | padding |
                                ^ size.num_decodes       ^ size.total_rows
        """
        self._turn()
        first = size.num_decodes
        num_tokens = sum(len(step.token_ids) for step in prefills)
        slots, per_sequence = self._many.host["slots"], self._per_sequence.host
        slots[len(decodes) : first] = -1
        slots[first + num_tokens : size.total_rows] = -1
        per_sequence["seq_lens"][len(decodes) : first] = 0
        per_sequence["seq_lens"][first + len(prefills) : first + size.num_sequences] = 0
        per_sequence["query_starts"][len(prefills) : size.num_sequences + 1] = num_tokens
        per_sequence["sampled"][:] = 0  # padding samples some row, to no use
        self._fill_mixed(decodes, prefills, first)

    def chunk(self, size: ChunkSize) -> GpuBatch:
        """What :meth:`fill_chunk` uploads for such a size."""
        first, num_rows, num_sequences = size
        tables, lens = self._tables, self._per_sequence.device["seq_lens"]
        decode = None
        if first:
            decode = DecodeRows(tables[:first], lens[:first], self._max_model_len)
        prefill = PrefillRows(
            tables[first : first + num_sequences],
            self._per_sequence.device["query_starts"][: num_sequences + 1],
            lens[first : first + num_sequences],
            ((num_rows, self._max_model_len),),
            is_bound=True,
        )
        return _batch(self._many.device, size.total_rows, decode, prefill)

    def sampled(self, num_rows: int) -> Tensor:
        """Rows of a chunk or a mixed batch that sample, ``[num_rows]`` int64."""
        return self._per_sequence.device["sampled"][:num_rows]

    def _sampled(self, steps: Sequence[SequenceStep]) -> SampledRows:
        """Rows of the mixed batch that sample, also by themselves."""
        ends = [step.start + len(step.token_ids) for step in steps if step.sample]
        per_sequence = self._per_sequence.device
        found = per_sequence["sources"][: len(ends)]
        last = DecodeRows(
            self._tables[found], per_sequence["seq_lens"][found], max(ends, default=1)
        )
        return SampledRows(self.sampled(len(ends)), last)

    def _mixed(self, decodes: Sequence[SequenceStep], prefills: Sequence[SequenceStep]) -> GpuBatch:
        num_tokens = len(decodes) + sum(len(step.token_ids) for step in prefills)
        split, end = len(decodes), len(decodes) + len(prefills)
        tables, lens = self._tables, self._per_sequence.device["seq_lens"]
        decode = None
        if decodes:
            longest = max(step.start for step in decodes) + 1
            decode = DecodeRows(tables[:split], lens[:split], longest)
        prefill = None
        if prefills:
            prefill = PrefillRows(
                tables[split:end],
                self._per_sequence.device["query_starts"][: len(prefills) + 1],
                lens[split:end],
                tuple((len(s.token_ids), s.start + len(s.token_ids)) for s in prefills),
            )
        batch = _batch(self._many.device, num_tokens, decode, prefill)
        return replace(batch, sampled=self._sampled([*decodes, *prefills]))

    # -- both -------------------------------------------------------------------------------------

    def _turn(self) -> None:
        for buffers in (self._one_each, self._many, self._per_sequence, self._packed):
            buffers.turn()

    def _grow_tables(self, steps: Sequence[SequenceStep]) -> IntArray:
        """Rows of the steps' sequences, whose tables got their new blocks."""
        rows = [self.rows.row(step.seq_id) for step in steps]
        for row, step in zip(rows, steps, strict=True):
            self.rows.append(row, step.new_block_ids)
        return np.array(rows, np.int64)

    def _put_decodes(
        self, host: dict[str, IntArray], steps: Sequence[SequenceStep], rows: IntArray
    ) -> None:
        count = len(steps)
        positions = np.array([step.start for step in steps], np.int64)
        # No row may hold PENDING, as a later step may have it for padding.
        host["token_ids"][:count] = [max(step.token_ids[0], 0) for step in steps]
        host["positions"][:count] = positions
        host["slots"][:count] = self._slots(rows, positions)
        self._per_sequence.host["seq_lens"][:count] = positions + 1

    def _slots(self, rows: IntArray | int, positions: IntArray) -> IntArray:
        size = self._block_size
        slots: IntArray = self.rows.tables[rows, positions // size].astype(np.int64)
        slots *= size
        slots += positions % size
        return slots

    def _put_sampling(self, rows: IntArray) -> None:
        count, host = len(rows), self._per_sequence.host
        for name in _PER_SAMPLE:
            host[name][:count] = getattr(self.rows, name)[rows]
        self.rows.index[rows] += 1

    def _put_tables(
        self, rows: IntArray, steps: Sequence[SequenceStep], num_decodes: int, first: int
    ) -> None:
        """Upload the tables as far as any of the steps reads them.

        Those behind the first ``num_decodes`` have their places from ``first`` on.
        """
        end = max(step.start + len(step.token_ids) for step in steps)
        width, count = -(-end // self._block_size), len(rows)
        packed = self._packed.host["tables"][: count * width].reshape(count, width)
        np.take(self.rows.tables[:, :width], rows, axis=0, out=packed)
        uploaded = self._packed.upload_start("tables", count * width).view(count, width)
        if first == num_decodes:
            self._tables[:count, :width] = uploaded
        else:
            self._tables[:num_decodes, :width] = uploaded[:num_decodes]
            end = first + count - num_decodes
            self._tables[first:end, :width] = uploaded[num_decodes:]


def _batch(
    per_token: Mapping[str, Tensor],
    num_tokens: int,
    decode: DecodeRows | None,
    prefill: PrefillRows | None,
) -> GpuBatch:
    token_ids, positions, slots = (per_token[name][:num_tokens] for name in _PER_TOKEN)
    return GpuBatch(token_ids, positions, slots, decode, prefill)
