"""Copies between a pool and host memory; on the CPU what needs no streams, with a GPU all of it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from sessionkv.engine.device_memory import Copy, copy_bytes, reserve
from sessionkv.engine.gpu.batched_copies import BatchedCopies
from sessionkv.engine.gpu.copier import GpuCopier

NUM_BLOCKS = 6
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
ELEMENTS = 3 * 5 * 2048  # of two bytes: no multiple of a power of two blocks


class Ends:
    """A pool of canaries, and host memory of as many blocks."""

    def __init__(
        self, device: str, *, pinned: bool = True, batched: BatchedCopies | None = None
    ) -> None:
        shape = (NUM_BLOCKS, 3, 5, 2048)
        self.pool = torch.full(shape, -1.5, dtype=torch.bfloat16, device=device)
        self.block_bytes = 2 * ELEMENTS
        self.host = reserve(NUM_BLOCKS * self.block_bytes)
        self.copier = GpuCopier(self.pool, batched=batched)
        if pinned:
            self.copier.pin(self.host, self.block_bytes)
            self.copier.wait_pinned()

    def view(self, block: int) -> memoryview:
        return self.host[block * self.block_bytes :][: self.block_bytes]

    def pairs(self, blocks: Sequence[tuple[int, int]]) -> list[Copy]:
        return [(block, self.view(host)) for block, host in blocks]

    def block(self, block: int) -> bytes:
        return self.pool[block].cpu().view(torch.uint8).numpy().tobytes()

    def fill_host(self) -> None:
        data = torch.frombuffer(self.host, dtype=torch.uint8)
        data.random_(generator=torch.Generator().manual_seed(7))


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[True, False], ids=["pinned", "unpinned"])
def ends(device: str, request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = Ends(device, pinned=request.param)
    yield made
    made.copier.close()


def test_bytes_go_up_and_down_and_nowhere_else(ends: Ends) -> None:
    canary = ends.block(0)
    ends.fill_host()
    sent = {host: bytes(ends.view(host)) for host in range(NUM_BLOCKS)}
    copier = ends.copier
    assert copier.copy_in(ends.pairs([(4, 0), (1, 5)]), copier.fence()).wait() == [True, True]
    assert [ends.block(block) for block in range(NUM_BLOCKS)] == [
        canary, sent[5], canary, canary, sent[0], canary,
    ]  # fmt: skip
    pairs = ends.pairs([(4, 2), (0, 3), (1, 1)])
    assert copier.copy_out(pairs, copier.fence()).wait() == [True] * 3
    assert [bytes(ends.view(host)) for host in range(NUM_BLOCKS)] == [
        sent[0], sent[5], sent[0], canary, sent[4], sent[5],
    ]  # fmt: skip


def test_steps_that_are_held_see_what_was_copied(ends: Ends) -> None:
    ends.fill_host()
    copier = ends.copier
    seen = torch.empty_like(ends.pool[4])
    seen.copy_(ends.pool[4])  # so that nothing is prepared, and waited for, after the hold
    fence = copier.fence()
    if copier._streams is not None:
        torch.cuda.synchronize()
        with torch.cuda.stream(copier._streams[True]):
            torch.cuda._sleep(10**9)  # half a second; the compute stream has nothing before it
    copying = copier.copy_in([*ends.pairs([(4, 0)]), (NUM_BLOCKS, ends.view(1))], fence)
    assert copying.hold_steps() == [True, False]
    seen.copy_(ends.pool[4])
    assert seen.cpu().view(torch.uint8).numpy().tobytes() == bytes(ends.view(0))
    assert copying.wait() == [True, False]


def test_what_does_not_fit_is_left_out(ends: Ends) -> None:
    canary = ends.block(0)
    copier = ends.copier
    copies = [(0, ends.view(0)), (-1, ends.view(1)), (NUM_BLOCKS, ends.view(2))]
    copies.append((1, ends.view(3)[:-1]))
    assert copier.copy_out(copies, copier.fence()).wait() == [True, False, False, False]
    assert bytes(ends.view(0)) == canary
    assert not any(ends.host[ends.block_bytes :])
    assert copier.copy_in(copies[1:], copier.fence()).wait() == [False] * 3
    assert copier.copy_in([], copier.fence()).wait() == []
    assert all(ends.block(block) == canary for block in range(NUM_BLOCKS))


def test_a_pool_made_by_inference_can_be_written() -> None:
    with torch.inference_mode():
        pool = torch.zeros((2, 8), dtype=torch.float16)
    copier = GpuCopier(pool)
    assert copier.copy_in([(1, memoryview(bytearray(range(16))))], copier.fence()).wait() == [True]
    assert pool.view(torch.uint8).tolist() == [[0] * 16, list(range(16))]
    copier.close()


# -- all in one call


@dataclass
class FakeRuntime:
    """The call as C sees it, carried out at once.

    Attributes:
        status: Answered instead, where it is not 0.
        calls: How many copies each call was for, and on which stream.
        forgotten: How often an error was taken away.
    """

    status: int = 0
    calls: list[tuple[int, int | None]] = field(default_factory=list)
    forgotten: int = 0

    def batched(self) -> BatchedCopies:
        pointers, sizes = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t)
        number, address = ctypes.c_size_t, ctypes.c_void_p
        kinds = pointers, pointers, sizes, number, address, sizes, number, address
        return BatchedCopies(ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(self.call), self.forget)

    def call(self, targets, sources, sizes, count, attributes, firsts, num_attributes, stream):
        self.calls.append((count, stream))
        order = ctypes.cast(attributes, ctypes.POINTER(ctypes.c_int))[0]
        if self.status or (order, firsts[0], num_attributes) != (1, 0, 1):
            return self.status or 1
        for i in range(count):
            ctypes.memmove(targets[i], sources[i], sizes[i])
        return 0

    def forget(self) -> int:
        self.forgotten += 1
        return self.status


def test_all_copies_of_a_call_are_enqueued_at_once() -> None:
    runtime = FakeRuntime()
    ends = Ends("cpu", batched=runtime.batched())
    canary = ends.block(0)
    ends.fill_host()
    sent = [bytes(ends.view(host)) for host in range(NUM_BLOCKS)]
    copies = [*ends.pairs([(4, 0), (1, 5)]), (NUM_BLOCKS, ends.view(1)), *ends.pairs([(0, 2)])]
    assert ends.copier.copy_in(copies, None).wait() == [True, True, False, True]
    expected = [sent[2], sent[5], canary, canary, sent[0], canary]
    assert [ends.block(block) for block in range(NUM_BLOCKS)] == expected
    assert ends.copier.copy_out(ends.pairs([(5, 0), (4, 3)]), None).wait() == [True, True]
    assert [bytes(ends.view(host)) for host in (0, 3)] == [canary, sent[0]]
    assert ends.copier.copy_in([], None).wait() == []
    assert runtime.calls == [(3, None), (2, None)]
    assert runtime.forgotten == 0
    ends.copier.close()


def test_what_cannot_be_enqueued_at_once_is_copied_one_by_one() -> None:
    runtime = FakeRuntime(status=801)
    ends = Ends("cpu", batched=runtime.batched())
    ends.fill_host()
    assert ends.copier.copy_in(ends.pairs([(3, 1), (2, 0)]), None).wait() == [True, True]
    assert [ends.block(3), ends.block(2)] == [bytes(ends.view(1)), bytes(ends.view(0))]
    assert (len(runtime.calls), runtime.forgotten) == (1, 1)
    ends.copier.close()


# -- on a GPU only


@pytest.mark.gpu
def test_the_runtime_takes_all_copies_at_once_on_the_stream_given() -> None:
    batched = BatchedCopies.of_runtime()
    assert batched is not None
    device = torch.arange(12, dtype=torch.int64, device="cuda").view(3, 4)
    host = torch.zeros((3, 4), dtype=torch.int64, pin_memory=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    rows = [0, 2]
    targets = [host[row].data_ptr() for row in rows]
    sources = [device[row].data_ptr() for row in reversed(rows)]
    assert batched.enqueue(targets, sources, 32, stream=stream.cuda_stream)
    stream.synchronize()
    assert host.tolist() == [[8, 9, 10, 11], [0] * 4, [0, 1, 2, 3]]


def _busy() -> None:
    """Keep the compute stream from going on for a good part of a second."""
    torch.cuda._sleep(1_000_000_000)


@pytest.mark.gpu
def test_a_spill_waits_for_the_kernels_before_its_fence() -> None:
    ends = Ends("cuda")
    torch.cuda.synchronize()
    _busy()
    ends.pool[2].fill_(2.0)
    fence = ends.copier.fence()
    copying = ends.copier.copy_out(ends.pairs([(2, 0)]), fence)
    assert copying.wait() == [True]
    spilled = torch.frombuffer(ends.view(0), dtype=torch.bfloat16)
    assert torch.equal(spilled, torch.full_like(spilled, 2.0))
    ends.copier.close()


@pytest.mark.gpu
def test_a_fetch_waits_for_the_kernels_before_its_fence() -> None:
    ends = Ends("cuda")
    ends.fill_host()
    seen = torch.zeros_like(ends.pool[2])
    torch.cuda.synchronize()
    _busy()
    seen.copy_(ends.pool[2])
    assert ends.copier.copy_in(ends.pairs([(2, 0)]), ends.copier.fence()).wait() == [True]
    after: Tensor = ends.pool[2].clone()
    assert torch.equal(seen, torch.full_like(seen, -1.5))
    fetched = torch.frombuffer(ends.view(0), dtype=torch.int16)
    assert torch.equal(after.cpu().view(torch.int16).flatten(), fetched)
    ends.copier.close()


@pytest.mark.gpu
def test_copies_do_not_wait_for_kernels_behind_their_fence() -> None:
    ends = Ends("cuda")
    torch.cuda.synchronize()
    fence = ends.copier.fence()
    _busy()
    done = torch.cuda.Event()
    done.record()
    assert ends.copier.copy_out(ends.pairs([(0, 0)]), fence).wait() == [True]
    assert not done.query()
    ends.copier.close()


@pytest.mark.gpu
def test_memory_is_pinned_until_the_copier_is_closed() -> None:
    ends = Ends("cuda")
    tensor = torch.frombuffer(ends.host, dtype=torch.uint8)
    assert tensor.is_pinned()
    ends.copier.close()
    assert not tensor.is_pinned()
    copy_bytes(ends.view(0), ends.view(1))  # still ordinary memory


@pytest.mark.gpu
def test_blocks_beyond_two_to_the_31_elements() -> None:
    pool = torch.zeros((2**31 // 1024 + 8, 1024), dtype=torch.bfloat16, device="cuda")
    copier = GpuCopier(pool)
    data = memoryview(bytearray(b"\x40" * 2048))
    last = len(pool) - 1
    assert copier.copy_in([(last, data)], copier.fence()).wait() == [True]
    back = memoryview(bytearray(2048))
    assert copier.copy_out([(last, back)], copier.fence()).wait() == [True]
    assert back == data
    assert not pool[:-1].any()
    copier.close()
