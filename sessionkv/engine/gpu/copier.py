"""Copies blocks of a pool on a GPU to and from host memory, beside the steps that compute.

Each direction has a CUDA stream of its own, so that both use the bus at once and neither is queued
behind kernels. What orders them behind compute is a fence: an event on the compute stream. Why that
is enough is said in :mod:`sessionkv.engine.device_memory`.

A block is copied whole: its extent is contiguous, and a copy of that size reaches the speed of the
bus wherever the block lies. All copies of a call are enqueued at once where the runtime can
(:mod:`sessionkv.engine.gpu.batched_copies`). The pool may as well be a tensor on the CPU, for
tests: then there are no streams and copies end as they are made.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sessionkv.engine.device_memory import Copied, Copy, Copying, address_of
from sessionkv.engine.gpu.batched_copies import BatchedCopies
from sessionkv.engine.pinning import Pinner

_log = logging.getLogger(__name__)

# cudaHostRegisterPortable: for whatever context a copy is made in.
_PORTABLE = 1


@dataclass(frozen=True, slots=True)
class _Enqueued:
    """Copies on a stream; ``kept`` is the host's memory."""

    device: torch.device
    ended: torch.cuda.Event
    arrived: list[bool]
    kept: Sequence[Copy]

    def wait(self) -> list[bool]:
        """See :class:`~sessionkv.engine.device_memory.Copying`."""
        self.ended.synchronize()  # releases the interpreter lock
        return self.arrived

    def hold_steps(self) -> list[bool]:
        """See :class:`~sessionkv.engine.device_memory.Copying`.

        What was enqueued can fail only with the whole CUDA context.
        """
        torch.cuda.current_stream(self.device).wait_event(self.ended)
        return self.arrived


class CudaRegistrar:
    """Registers host memory with CUDA. Not while a graph is captured, which that would break."""

    def __init__(self, device: torch.device) -> None:
        """For a CUDA device."""
        self._device = device

    def register(self, address: int, num_bytes: int) -> None:
        """See :class:`~sessionkv.engine.pinning.Registrar`."""
        with torch.cuda.device(self._device):  # else a context is made on the first of them
            _check(_cudart().cudaHostRegister(address, num_bytes, _PORTABLE))

    def unregister(self, address: int) -> None:
        """See :class:`~sessionkv.engine.pinning.Registrar`."""
        with torch.cuda.device(self._device):
            _check(_cudart().cudaHostUnregister(address))


class GpuCopier:
    """A :class:`~sessionkv.engine.device_memory.DeviceMemory` over a tensor of blocks.

    Attributes:
        view: None: no extent is in host memory.
    """

    view = None

    def __init__(self, pool: Tensor, *, batched: BatchedCopies | None = None) -> None:
        """Over a contiguous pool ``[num_blocks, ...]`` of any dtype, which is kept until close.

        Args:
            pool: On a GPU, or on the CPU for tests.
            batched: Other than the runtime's own, for tests.
        """
        self._extents = pool.view(pool.shape[0], -1).view(torch.uint8)
        self._num_blocks, self._block_bytes = self._extents.shape
        self._device = pool.device
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._pinner: Pinner | None = None
        self._batched = batched
        if pool.is_cuda:
            self._streams = _stream(pool.device), _stream(pool.device)
            self._pinner = Pinner(CudaRegistrar(pool.device))
            self._batched = batched or BatchedCopies.of_runtime()

    def pin(self, memory: memoryview, block_bytes: int) -> None:
        """Register host memory in the background; see :mod:`sessionkv.engine.pinning`."""
        if self._pinner is not None:
            self._pinner.pin(memory, block_bytes)

    def wait_pinned(self) -> None:
        """Wait until the memory given to :meth:`pin` is registered, as far as it can be."""
        if self._pinner is not None:
            self._pinner.wait()

    def fence(self) -> object:
        """An event behind all that this thread has launched on its current stream."""
        if self._streams is None:
            return None
        return _recorded(torch.cuda.current_stream(self._device))

    def copy_out(self, copies: Sequence[Copy], after: object) -> Copying:
        """Copy blocks to host memory; memory that is not pinned is waited for here."""
        return self._copy(copies, after, is_in=False)

    def copy_in(self, copies: Sequence[Copy], after: object) -> Copying:
        """Copy host memory to blocks; as :meth:`copy_out`."""
        return self._copy(copies, after, is_in=True)

    def close(self) -> None:
        """Wait for what is under way, unregister host memory, let go of the pool."""
        try:
            for stream in self._streams or ():
                stream.synchronize()
        finally:
            if self._pinner is not None:
                self._pinner.close()
            del self._extents

    @torch.inference_mode()
    def _copy(self, copies: Sequence[Copy], after: object, *, is_in: bool) -> Copying:
        """Copy what can be copied, on the stream of the direction."""
        arrived = [self._fits(*copy) for copy in copies]
        fitting = list(itertools.compress(copies, arrived))
        if self._streams is None:
            self._enqueue(fitting, 0, is_in=is_in)
            return Copied(arrived)
        stream = self._streams[is_in]
        with torch.cuda.stream(stream):
            if isinstance(after, torch.cuda.Event):
                stream.wait_event(after)
            self._enqueue(fitting, stream.cuda_stream, is_in=is_in)
            ended = _recorded(stream)
        return _Enqueued(self._device, ended, arrived, fitting)

    def _fits(self, block_id: int, memory: memoryview) -> bool:
        fits = 0 <= block_id < self._num_blocks and memory.nbytes == self._block_bytes
        if not fits:
            _log.error("%d bytes cannot be copied with block %d", memory.nbytes, block_id)
        return fits

    def _enqueue(self, copies: Sequence[Copy], stream: int, *, is_in: bool) -> None:
        """All at once; one by one where that cannot be, on the current stream."""
        if copies and not self._enqueue_batch(copies, stream, is_in=is_in):
            extents = [self._extents[block_id] for block_id, _ in copies]
            memories = [torch.frombuffer(memory, dtype=torch.uint8) for _, memory in copies]
            torch._foreach_copy_(
                *((extents, memories) if is_in else (memories, extents)), non_blocking=True
            )

    def _enqueue_batch(self, copies: Sequence[Copy], stream: int, *, is_in: bool) -> bool:
        if self._batched is None:
            return False
        first, num_bytes = self._extents.data_ptr(), self._block_bytes
        extents = [first + block_id * num_bytes for block_id, _ in copies]
        memories = [address_of(memory) for _, memory in copies]
        targets, sources = (extents, memories) if is_in else (memories, extents)
        return self._batched.enqueue(targets, sources, num_bytes, stream=stream)


def _stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind what is on a stream now.

    A thread that waits for it sleeps: spinning would take a core from the step loop.
    """
    event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(status: Any) -> None:
    """A status of the CUDA runtime, of whatever type this version of torch gives it."""
    if int(status):
        raise torch.cuda.CudaError(int(status))
