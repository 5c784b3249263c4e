"""The guards themselves: kernels that leave what they were given are caught."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.builders.guarded import Guarded

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)


@triton.jit
def _copy_one(
    source: tl.tensor, target: tl.tensor, read_at: tl.tensor, write_at: tl.tensor
) -> None:
    tl.store(target + write_at, tl.load(source + read_at))


@triton.jit
def _read_too_far(
    source: tl.tensor, target: tl.tensor, count: tl.tensor, TILE: tl.constexpr
) -> None:
    lane = tl.arange(0, TILE)
    values = tl.load(source + lane)  # without a mask; what is too much is dropped afterwards
    tl.store(target + lane, tl.where(lane < count, values, 0.0), mask=lane < count)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("write_at", "bytes_at"), [(-1, -1), (5, 5)])
def test_one_element_written_on_either_side_is_caught(
    device: torch.device, dtype: torch.dtype, write_at: int, bytes_at: int
) -> None:
    memory = Guarded(device)
    source, target = (
        memory.given(torch.ones(5, dtype=dtype)),
        memory.written(torch.zeros(5).to(dtype)),
    )
    _copy_one[(1,)](source, target, 2, 3)
    memory.check()
    _copy_one[(1,)](source, target, 2, write_at)
    with pytest.raises(AssertionError, match=rf"bytes \[{bytes_at * dtype.itemsize}, "):
        memory.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("read_at", [-1, 5])
def test_one_element_read_on_either_side_shows(
    device: torch.device, dtype: torch.dtype, read_at: int
) -> None:
    memory = Guarded(device)
    source, target = (
        memory.given(torch.ones(5, dtype=dtype)),
        memory.written(torch.zeros(5).to(dtype)),
    )
    _copy_one[(1,)](source, target, read_at, 3)
    memory.check()
    assert target[3].isnan() if dtype.is_floating_point else target[3] > 2**30


def test_memory_that_a_launch_allocates_has_guards_and_holds_no_zeros(device: torch.device) -> None:
    memory = Guarded(device)
    source = memory.given(torch.ones(5))
    for make in (
        lambda: torch.empty(3, device=device),
        lambda: torch.empty_like(source)[:3],
        lambda: source.new_empty((3,)),
    ):
        with memory:
            target = make()
        assert target.isnan().all()
        memory.check()
        size = target.untyped_storage().nbytes()
        assert size > 2**17
    _copy_one[(1,)](source, target, 0, 3)
    with pytest.raises(AssertionError, match=r"bytes \[12, 13, 14, 15\] of a tensor \[3\] were"):
        memory.check()


def test_what_was_only_given_may_not_be_written(device: torch.device) -> None:
    memory = Guarded(device)
    source = memory.given(torch.ones(5), shift=1)
    assert source.data_ptr() % 16 == 4
    _copy_one[(1,)](source, source, 0, 1)
    memory.check()
    source[4] = 2.0
    with pytest.raises(AssertionError, match="only to be read"):
        memory.check()


def test_a_read_without_influence_is_caught_by_its_address(device: torch.device) -> None:
    memory = Guarded(device)
    source, target = memory.given(torch.ones(5)), memory.written(torch.zeros(5))
    memory.run(_read_too_far[(1,)], source, target, 4, TILE=4)
    if device.type == "cpu":
        with pytest.raises(Exception, match="3 of 8 addresses are outside"):
            memory.run(_read_too_far[(1,)], source, target, 5, TILE=8)
    _read_too_far[(1,)](source, target, 5, TILE=8)  # nobody looks any more
    memory.check()
    assert target.tolist() == [1.0] * 5
