"""Many copies between host and device in one call of the CUDA runtime.

A call for each block costs the host some microseconds, and each time the interpreter lock where
other threads want it too: measured on a PCIe 5 x16 bus, blocks of 2.25 MiB move at 50 GB/s one by
one and at 16 beside a busy thread, in one call at 53.5 and 49.5 (a single large copy: 54.5).

Torch has no name for ``cudaMemcpyBatchAsync``, so it is called in the runtime that torch has
loaded. Knows addresses; no blocks, no pools, no fences.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

_FIRST_CUDA = 13  # the call has had this form since then
_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream: sources are read when their turn has come

RuntimeCall = Callable[..., int]
"""As ``cudaMemcpyBatchAsync(dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, stream)``."""


class _Attributes(ctypes.Structure):
    """``cudaMemcpyAttributes``; where the memory lies is found out by the runtime."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_kind", ctypes.c_int),
        ("source_id", ctypes.c_int),
        ("target_kind", ctypes.c_int),
        ("target_id", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


class BatchedCopies:
    """Enqueues copies of equal length. Any thread."""

    def __init__(self, call: RuntimeCall, forget_error: Callable[[], int]) -> None:
        """Over functions of a runtime.

        Args:
            call: See :data:`RuntimeCall`; lets other threads run meanwhile.
            forget_error: As ``cudaGetLastError``: an error that was seen is not to be found by
                whoever asks next.
        """
        self._call, self._forget_error = call, forget_error

    @classmethod
    def of_runtime(cls) -> BatchedCopies | None:
        """Of the runtime that torch has loaded; None where that has no such call."""
        major = int((torch.version.cuda or "0").split(".")[0])
        if major < _FIRST_CUDA:
            return None
        try:
            runtime = ctypes.CDLL(f"libcudart.so.{major}")
            return cls(runtime.cudaMemcpyBatchAsync, runtime.cudaGetLastError)
        except (OSError, AttributeError):
            return None

    def enqueue(
        self, targets: Sequence[int], sources: Sequence[int], num_bytes: int, *, stream: int
    ) -> bool:
        """Enqueue a copy of ``num_bytes`` from each source address to its target, in any order.

        O(copies), about 0.2 us each; never waits for pinned memory.

        Args:
            targets: Where to. No two ranges overlap.
            sources: Where from, one for each target.
            num_bytes: Of each copy.
            stream: Handle of the stream; not the default one.

        Returns:
            Whether they were enqueued; if not, none of them was.
        """
        count = len(targets)
        pointers = ctypes.c_void_p * count
        attributes = _Attributes(source_order=_STREAM_ORDER)
        status = self._call(
            pointers(*targets),
            pointers(*sources),
            (ctypes.c_size_t * count)(*[num_bytes] * count),
            ctypes.c_size_t(count),
            ctypes.byref(attributes),
            (ctypes.c_size_t * 1)(0),  # the first copy that the attributes are for
            ctypes.c_size_t(1),
            ctypes.c_void_p(stream),
        )
        if status:
            self._forget_error()
        return not status
