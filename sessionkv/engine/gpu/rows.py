"""What the GPU runner remembers of running sequences, row by row, as arrays that numpy can gather.

A sequence has one row from its start to its end: its block table and its sampling parameters. A
step of many sequences then costs a handful of array operations, and loops over its sequences only,
not over tokens or blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sessionkv.errors import SessionKVError
from sessionkv.types import SequenceStart


class SequenceRows:
    """Rows of running sequences. The step loop's thread only.

    Attributes:
        tables: ``[max_running, max_blocks]`` int32: block ids, as far as they are known.
        temperature, top_p, min_p: ``[max_running]`` float32.
        top_k: ``[max_running]`` int32.
        seed: ``[max_running]`` int64, the bits of the unsigned seed.
        index: ``[max_running]`` int64: tokens sampled so far, also by steps in flight.
    """

    def __init__(self, max_running: int, max_blocks: int) -> None:
        """No sequence runs yet."""
        self.tables = np.zeros((max_running, max_blocks), np.int32)
        self.temperature = np.zeros(max_running, np.float32)
        self.top_p = np.ones(max_running, np.float32)
        self.min_p = np.zeros(max_running, np.float32)
        self.top_k = np.zeros(max_running, np.int32)
        self.seed = np.zeros(max_running, np.int64)
        self.index = np.zeros(max_running, np.int64)
        self._num_blocks = [0] * max_running
        self._rows: dict[int, int] = {}
        self._free = list(range(max_running - 1, -1, -1))

    def start(self, start: SequenceStart) -> int:
        """Give a sequence a row.

        Raises:
            SessionKVError: It has one, or there is none.
        """
        if start.seq_id in self._rows:
            raise SessionKVError(f"sequence {start.seq_id} is in the batch already")
        if not self._free:
            raise SessionKVError(f"{len(self._rows)} sequences run; there is no row for another")
        row = self._rows[start.seq_id] = self._free.pop()
        sampling = start.sampling
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.top_k[row] = sampling.top_k
        self.seed[row] = np.uint64(sampling.seed or 0).astype(np.int64)
        self.index[row] = len(start.token_ids) - start.num_prompt_tokens
        self._num_blocks[row] = 0
        self.append(row, start.block_ids)
        return row

    def end(self, seq_id: int) -> None:
        """Take a row back; a sequence whose start failed is not known, which is fine."""
        row = self._rows.pop(seq_id, None)
        if row is not None:
            self._free.append(row)

    def row(self, seq_id: int) -> int:
        """The row of a running sequence."""
        return self._rows[seq_id]

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """Add blocks to the end of a table."""
        if block_ids:
            known = self._num_blocks[row]
            self.tables[row, known : known + len(block_ids)] = block_ids
            self._num_blocks[row] = known + len(block_ids)
