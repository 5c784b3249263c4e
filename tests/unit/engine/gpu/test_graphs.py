from __future__ import annotations

import torch

from sessionkv.engine.gpu.graphs import (
    StepGraphs,
    chunk_size_for,
    chunk_sizes,
    graph_sizes,
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
    sizes = chunk_sizes(8192, 256)
    assert chunk_size_for(sizes, 65, 1) == (96, 1)
    assert chunk_size_for(sizes, 65, 2) == (96, 8)
    assert chunk_size_for(sizes, 9, 9) == (64, 64)
    assert chunk_size_for(sizes, 640, 64) == (640, 64)
    assert chunk_size_for(sizes, 641, 1) is None
    assert chunk_size_for(sizes, 100, 65) is None


def test_sizes_stay_within_what_a_step_may_be() -> None:
    sizes = chunk_sizes(48, 4)
    assert sizes == [(16, 1), (32, 1), (48, 1)]
    assert all(s <= r for r, s in chunk_sizes(8192, 256))


def test_on_the_cpu_steps_run_as_they_are() -> None:
    ran: list[int] = []
    graphs = StepGraphs(ran.append, [1, 2], torch.device("cpu"))
    told: list[int] = []
    graphs.capture(told.append)
    graphs.run(2)
    assert (ran, told) == ([2], [])
