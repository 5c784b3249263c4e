"""Steps of one token a sequence as CUDA graphs: hundreds of launches replayed by one call.

A graph has a fixed number of rows, so there is one for each of some sizes, and a step is padded to
the next. They share their scratch memory, since only one runs at a time; the largest is captured
first, so that the others fit into what it took.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch


def graph_sizes(max_rows: int) -> list[int]:
    """Sizes up to ``max_rows``, itself included: close together where padding costs most."""
    sizes = [*range(1, 9), *range(16, 257, 8), *range(272, 513, 16), *range(544, max_rows + 1, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


class StepGraphs:
    """Runs a step of a given size. The step loop's thread only."""

    def __init__(self, step: Callable[[int], None], max_rows: int, device: torch.device) -> None:
        """Nothing is captured yet: until then, and on the CPU, steps run eagerly.

        Args:
            step: Computes so many rows, from and into memory at fixed addresses.
            max_rows: Most rows of a step.
            device: Where.
        """
        self._step = step
        self._sizes = graph_sizes(max_rows)
        self._device = device
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def size_for(self, num_rows: int) -> int:
        """Rows of the smallest step with room for ``num_rows``."""
        return self._sizes[bisect_left(self._sizes, num_rows)]

    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Capture every size; ``progress`` is told how many of how many are done."""
        if self._device.type != "cuda":
            return
        pool = torch.cuda.graph_pool_handle()
        for done, size in enumerate(reversed(self._sizes)):
            progress(done, len(self._sizes))
            self._step(size)  # compiles what is not compiled yet
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._step(size)
            self._graphs[size] = graph
        progress(len(self._sizes), len(self._sizes))

    def run(self, size: int) -> None:
        """Compute a step of one of the sizes."""
        graph = self._graphs.get(size)
        if graph is None:
            self._step(size)
        else:
            graph.replay()
