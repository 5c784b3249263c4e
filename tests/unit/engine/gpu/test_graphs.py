from __future__ import annotations

import pytest
import torch

from sessionkv.engine.gpu.graphs import (
    StepGraphs,
    chunk_size_for,
    chunk_sizes,
    graph_sizes,
    most_chunk_rows,
    size_for,
)


def test_every_count_has_the_next_size() -> None:
    sizes = graph_sizes(100)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == 100
    found = {count: size_for(sizes, count) for count in range(1, 101)}
    assert all(found[count] >= count for count in found)
    assert [found[count] for count in (1, 8, 9, 16, 17, 97, 100)] == [1, 8, 16, 16, 24, 100, 100]


def test_a_small_chunk_has_the_smallest_size_with_room() -> None:
    sizes = chunk_sizes(1024, 256)
    assert chunk_size_for(sizes, 0, 65, 1) == (0, 96, 1)
    assert chunk_size_for(sizes, 1, 64, 1) == (0, 96, 8)
    assert chunk_size_for(sizes, 0, 9, 9) == (0, 64, 64)
    assert chunk_size_for(sizes, 8, 1, 1) == (0, 64, 64)
    assert chunk_size_for(sizes, 0, 640, 64) == (0, 640, 64)
    assert chunk_size_for(sizes, 0, 641, 1) == (0, 768, 64)
    assert chunk_size_for(sizes, 0, 1025, 1) is None
    assert chunk_size_for(sizes, 0, 100, 65) is None


def test_many_that_decode_have_rows_of_their_own() -> None:
    sizes = chunk_sizes(2048, 256)
    assert chunk_size_for(sizes, 63, 64, 1) == (64, 64, 64)
    assert chunk_size_for(sizes, 64, 65, 64) == (64, 256, 64)
    assert chunk_size_for(sizes, 200, 3, 2) == (256, 64, 64)
    for decodes in range(1, 257):  # whole steps, however many of them decode
        size = chunk_size_for(sizes, decodes, 2048 - decodes, 5)
        assert size is not None
        assert size.total_rows <= 2048 + 128
    assert chunk_size_for(sizes, 256, 1921, 1) is None
    assert chunk_size_for(sizes, 257, 1, 1) is None


def test_sizes_stay_within_what_a_step_may_be() -> None:
    few = chunk_sizes(48, 4)
    assert few == [
        *((0, rows, sequences) for rows in (16, 32, 48) for sequences in (1, 4)), (4, 48, 4)
    ]  # fmt: skip
    many = chunk_sizes(2048, 256)
    assert many == sorted(set(many), key=lambda size: (size.total_rows, size))
    assert all(size.num_sequences <= size.num_rows for size in many)
    assert max(size.total_rows for size in many) == 2048 + 128


@pytest.mark.parametrize(
    ("layer_weights", "max_rows", "most"),
    [(193_000_000, 8192, 1024), (15_700_000, 8192, 2048), (10**9, 8192, 640), (1000, 256, 256)],
)
def test_the_smaller_the_model_the_larger_the_steps_that_are_graphs(
    layer_weights: int, max_rows: int, most: int
) -> None:
    assert most_chunk_rows(layer_weights, max_rows) == most


def test_on_the_cpu_steps_run_as_they_are() -> None:
    ran: list[int] = []
    graphs = StepGraphs(ran.append, [1, 2], torch.device("cpu"))
    told: list[int] = []
    graphs.capture(told.append)
    graphs.run(2)
    assert (ran, told) == ([2], [])
