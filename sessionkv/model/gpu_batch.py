"""The rows of one step, as the decoder on a GPU takes them: tensors on the device, bounds beside.

Plain values, with nothing of how they are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The rows of a step that are one new token each.

    Attributes:
        block_tables: ``[rows, max_blocks]`` int32.
        seq_lens: ``[rows]`` int32: positions with the new one; 0 is a padding row.
        max_seq_len: None of them is above.
    """

    block_tables: Tensor
    seq_lens: Tensor
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The rows of a step that come several to a sequence.

    Attributes:
        block_tables: ``[sequences, max_blocks]`` int32.
        query_starts: ``[sequences + 1]`` int32: first row of each, from 0.
        seq_lens: ``[sequences]`` int32: positions with the new ones.
        lengths: The same for the host: rows and positions of each sequence.
        is_bound: ``lengths`` is of one sequence, beyond which none of these goes: what is known
            where a step is captured to be replayed with others.
    """

    block_tables: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    lengths: tuple[tuple[int, int], ...]
    is_bound: bool = False

    @property
    def max_query_len(self) -> int:
        """Most rows of one sequence."""
        return max(rows for rows, _ in self.lengths)

    @property
    def max_seq_len(self) -> int:
        """Most positions of one sequence."""
        return max(positions for _, positions in self.lengths)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows of a step from which tokens are sampled: each the last one of its sequence.

    Attributes:
        rows: ``[count]`` int64: which of the batch's.
        last: The same rows by themselves, in the same order, as if each were decoded.
    """

    rows: Tensor
    last: DecodeRows


@dataclass(frozen=True, slots=True)
class GpuBatch:
    """One step's rows: first those that decode, then those that prefill.

    Attributes:
        token_ids: ``[num_tokens]`` int64.
        positions: ``[num_tokens]`` int64.
        slots: ``[num_tokens]`` int64: ``block_id * block_size + slot``; -1 writes nothing.
        decode: The first rows, or None.
        prefill: The others, or None.
        sampled: The only rows whose hidden states are wanted; None is all.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    decode: DecodeRows | None
    prefill: PrefillRows | None
    sampled: SampledRows | None = None
