"""Copies blocks of a pool on a GPU to and from host memory, beside the steps that compute.

Each direction has a CUDA stream of its own, so that both use the bus at once and neither is queued
behind kernels. What orders them behind compute is a fence: an event on the compute stream. Why that
is enough is said in :mod:`sessionkv.engine.device_memory`.

A block is copied whole: its extent is contiguous, and a copy of that size reaches the speed of the
bus wherever the block lies. The pool may as well be a tensor on the CPU, for tests: then there are
no streams and copies end as they are made.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sessionkv.engine.device_memory import Copied, Copy, Copying
from sessionkv.engine.pinning import Pinner

_log = logging.getLogger(__name__)

# cudaHostRegisterPortable: for whatever context a copy is made in.
_PORTABLE = 1


@dataclass(frozen=True, slots=True)
class _Enqueued:
    """Copies on a stream; ``kept`` are the tensors over their ends."""

    ended: torch.cuda.Event
    arrived: list[bool]
    kept: list[Tensor]

    def wait(self) -> list[bool]:
        """See :class:`~sessionkv.engine.device_memory.Copying`."""
        self.ended.synchronize()  # releases the interpreter lock
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

    def __init__(self, pool: Tensor) -> None:
        """Over a contiguous pool ``[num_blocks, ...]`` of any dtype, which is kept until close."""
        self._extents = pool.view(pool.shape[0], -1).view(torch.uint8)
        self._device = pool.device
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._pinner: Pinner | None = None
        if pool.is_cuda:
            self._streams = _stream(pool.device), _stream(pool.device)
            self._pinner = Pinner(CudaRegistrar(pool.device))

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
        extents, memories, arrived = self._ends(copies)
        return self._copy(memories, extents, arrived, stream=0, after=after)

    def copy_in(self, copies: Sequence[Copy], after: object) -> Copying:
        """Copy host memory to blocks; as :meth:`copy_out`."""
        extents, memories, arrived = self._ends(copies)
        return self._copy(extents, memories, arrived, stream=1, after=after)

    def close(self) -> None:
        """Wait for what is under way, unregister host memory, let go of the pool."""
        try:
            for stream in self._streams or ():
                stream.synchronize()
        finally:
            if self._pinner is not None:
                self._pinner.close()
            del self._extents

    def _ends(self, copies: Sequence[Copy]) -> tuple[list[Tensor], list[Tensor], list[bool]]:
        """Bytes at both ends of the copies that can be made, and which these are."""
        extents: list[Tensor] = []
        memories: list[Tensor] = []
        arrived: list[bool] = []
        for block_id, memory in copies:
            fits = 0 <= block_id < len(self._extents) and memory.nbytes == self._extents.shape[1]
            arrived.append(fits)
            if fits:
                extents.append(self._extents[block_id])
                memories.append(torch.frombuffer(memory, dtype=torch.uint8))
            else:
                _log.error("%d bytes cannot be copied with block %d", memory.nbytes, block_id)
        return extents, memories, arrived

    @torch.inference_mode()
    def _copy(
        self,
        targets: list[Tensor],
        sources: list[Tensor],
        arrived: list[bool],
        *,
        stream: int,
        after: object,
    ) -> Copying:
        """Copy each source to its target; ``stream`` is the direction's, 0 out and 1 in."""
        if self._streams is None:
            _copy_each(targets, sources)
            return Copied(arrived)
        with torch.cuda.stream(self._streams[stream]):
            if isinstance(after, torch.cuda.Event):
                self._streams[stream].wait_event(after)
            _copy_each(targets, sources)
            ended = _recorded(self._streams[stream])
        return _Enqueued(ended, arrived, [*targets, *sources])


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


def _copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """One copy of memory for each pair.

    In one call, which gives up the interpreter lock once: a thread that takes it again for each
    block would have to wait each time that the step loop holds it.
    """
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)
