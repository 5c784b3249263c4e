"""Small steps as CUDA graphs: hundreds of launches replayed by one call.

A graph has a fixed size, so there is one for each of some sizes, and a step is padded to the next.
They share their scratch memory, since only one runs at a time; the largest is captured first, so
that the others fit into what it took. Steps that keep the device busy for longer than launching
them takes need none; how large these are depends on the model.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

_Size = TypeVar("_Size", int, "ChunkSize")

_CHUNK_ROWS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024, 1536, 2048)
_CHUNK_SEQUENCES = (1, 8, 64)
# Whatever the model. Found with the 8B shape on an H200, which computes so many rows in about the
# 10 to 20 ms that launching 36 layers takes.
_ALWAYS_ROWS = 640
_MIXED_DECODES = (64, 128, 256)
_MIXED_ROWS = (64, 256, 512, 1024, 2048)
# Weights of a layer times rows that an H200 multiplies in the 0.6 ms that launching a layer takes.
_LAYER_WORK = 200_000_000_000


class ChunkSize(NamedTuple):
    """Room of a step in which some sequences compute more than one token.

    Attributes:
        num_decodes: First rows, for sequences that compute one token. 0: they are among the others.
        num_rows: The other rows.
        num_sequences: Sequences that these are of.
    """

    num_decodes: int
    num_rows: int
    num_sequences: int

    @property
    def total_rows(self) -> int:
        """All rows."""
        return self.num_decodes + self.num_rows


def most_chunk_rows(layer_weights: int, max_rows: int) -> int:
    """Rows up to which a step is to be a graph.

    Args:
        layer_weights: Elements of a layer's matrices.
        max_rows: No step has more.
    """
    busy = max(_ALWAYS_ROWS, _LAYER_WORK // layer_weights)
    return min(max_rows, max(rows for rows in _CHUNK_ROWS if rows <= busy))


def chunk_sizes(max_rows: int, max_sequences: int) -> list[ChunkSize]:
    """Sizes of such steps, up to these limits, by their rows.

    Where many decode they have rows of their own, as attention of one token a sequence goes another
    way; the largest such sizes have room for ``max_rows`` in all, however many of them decode.
    """
    rows = [size for size in _CHUNK_ROWS if size < max_rows] + [min(max_rows, _CHUNK_ROWS[-1])]
    most = min(max_sequences, _CHUNK_SEQUENCES[-1])
    sequences = [size for size in _CHUNK_SEQUENCES if size < most] + [most]
    sizes = [
        ChunkSize(0, r, s)
        for r in dict.fromkeys(rows)
        for s in (sequences if r <= _ALWAYS_ROWS else [most])
        if s <= r
    ]
    fewer = 0
    for decodes in _MIXED_DECODES:
        if fewer < max_sequences:
            beside = dict.fromkeys(min(size, max_rows - fewer) for size in _MIXED_ROWS)
            slots = min(decodes, max_sequences)
            sizes += [ChunkSize(slots, r, min(most, r)) for r in beside if r > 0]
        fewer = decodes
    return sorted(sizes, key=lambda size: (size.total_rows, size))


def chunk_size_for(
    sizes: Sequence[ChunkSize], num_decodes: int, num_rows: int, num_sequences: int
) -> ChunkSize | None:
    """The one with the fewest rows that has room, None where the step is too large.

    Among equals that with rows for those that decode.

    Args:
        sizes: From :func:`chunk_sizes`.
        num_decodes: Sequences that compute one token.
        num_rows: Tokens of the others.
        num_sequences: How many these are.
    """
    fitting = [
        size
        for size in sizes
        if (
            size.num_decodes >= num_decodes
            and size.num_rows >= num_rows
            and size.num_sequences >= num_sequences
            if size.num_decodes
            else size.num_rows >= num_decodes + num_rows
            and size.num_sequences >= num_decodes + num_sequences
        )
    ]
    return min(fitting, key=lambda size: (size.total_rows, -size.num_decodes, size), default=None)


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
