"""Small steps as CUDA graphs: hundreds of launches replayed by one call.

A graph has a fixed size, so there is one for each of some sizes, and a step is padded to the next.
They share their scratch memory, since only one runs at a time; the largest is captured first, so
that the others fit into what it took. Large steps keep the device busy for longer than launching
them takes, and need none.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

_Size = TypeVar("_Size", int, "ChunkSize")

ChunkSize = tuple[int, int]
"""Rows and sequences of a step in which some compute more than one token."""
_CHUNK_ROWS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 640)
_CHUNK_SEQUENCES = (1, 8, 64)


def chunk_sizes(max_rows: int, max_sequences: int) -> list[ChunkSize]:
    """Sizes of such steps that are small, up to these limits."""
    rows = [size for size in _CHUNK_ROWS if size < max_rows] + [min(max_rows, _CHUNK_ROWS[-1])]
    sequences = [size for size in _CHUNK_SEQUENCES if size <= max_sequences]
    return [(r, s) for r in dict.fromkeys(rows) for s in sequences if s <= r]


def chunk_size_for(
    sizes: Sequence[ChunkSize], num_rows: int, num_sequences: int
) -> ChunkSize | None:
    """The smallest with room for so much, None where the step is too large."""
    fitting = [(r, s) for r, s in sizes if r >= num_rows and s >= num_sequences]
    return min(fitting, default=None)


def graph_sizes(max_rows: int) -> list[int]:
    """Sizes up to ``max_rows``, itself included: close together where padding costs most."""
    sizes = [*range(1, 9), *range(16, 257, 8), *range(272, 513, 16), *range(544, max_rows + 1, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


def size_for(sizes: Sequence[int], num_rows: int) -> int:
    """The smallest of rising sizes with room for ``num_rows``."""
    return sizes[bisect_left(sizes, num_rows)]


class StepGraphs(Generic[_Size]):
    """Runs a step of a given size. The step loop's thread only.

    Attributes:
        sizes: Those there are, rising.
    """

    def __init__(
        self, step: Callable[[_Size], None], sizes: Sequence[_Size], device: torch.device
    ) -> None:
        """Nothing is captured yet: until then, and on the CPU, steps run eagerly.

        Args:
            step: Computes a step of that size, from and into memory at fixed addresses.
            sizes: What is to be captured, rising.
            device: Where.
        """
        self.sizes: Sequence[_Size] = sizes
        self._step: Callable[[_Size], None] = step
        self._device = device
        self._graphs: dict[_Size, torch.cuda.CUDAGraph] = {}

    def capture(self, progress: Callable[[int], None]) -> None:
        """Capture every size; ``progress`` is told how many are done."""
        if self._device.type != "cuda":
            return
        pool = torch.cuda.graph_pool_handle()
        gc.collect()
        collects = gc.isenabled()
        gc.disable()  # memory that happened to be freed within a capture would spoil it
        try:
            self._capture_all(pool, progress)
        finally:
            if collects:
                gc.enable()

    def _capture_all(self, pool: Any, progress: Callable[[int], None]) -> None:
        for done, size in enumerate(reversed(self.sizes)):
            progress(done)
            self._step(size)  # compiles what is not compiled yet
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._step(size)
            self._graphs[size] = graph
        progress(len(self.sizes))

    def run(self, size: _Size) -> None:
        """Compute a step of one of the sizes."""
        graph = self._graphs.get(size)
        if graph is None:
            self._step(size)
        else:
            graph.replay()
