"""What a step tells the device: arrays at fixed addresses, filled by one copy.

Each array exists twice, in host memory for numpy to write and on the device for kernels to read, at
the same offset of one buffer. Fixed addresses are what lets a CUDA graph be replayed with new
values.

Invariant: what was uploaded is not written again before the device is done with it; the runner sees
to that by waiting for a step's result before it fills the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[Any]
_ALIGNMENT = 16  # kernels may load 16 bytes at once
_DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}


class StepBuffers:
    """Arrays by name. The step loop's thread only.

    Attributes:
        host: Name -> numpy array to write.
        device: Name -> tensor with the same content after :meth:`upload`.
    """

    def __init__(
        self, arrays: Mapping[str, tuple[str, tuple[int, ...]]], device: torch.device
    ) -> None:
        """Allocate, all zero.

        Args:
            arrays: Name -> dtype name and shape.
            device: Where kernels run; on the CPU, host and device share their memory.
        """
        offsets, end = {}, 0
        for name, (dtype, shape) in arrays.items():
            offsets[name] = end
            nbytes = math.prod(shape) * _DTYPES[dtype].itemsize
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=is_cuda)
        self._device = torch.zeros(end, dtype=torch.uint8, device=device) if is_cuda else self._host
        self.host: dict[str, IntArray] = {}
        self.device: dict[str, Tensor] = {}
        for name, (dtype, shape) in arrays.items():
            count = math.prod(shape) * _DTYPES[dtype].itemsize
            part = slice(offsets[name], offsets[name] + count)
            self.host[name] = self._host[part].view(_DTYPES[dtype]).view(shape).numpy()
            self.device[name] = self._device[part].view(_DTYPES[dtype]).view(shape)

    def upload(self) -> None:
        """Start copying everything; kernels launched from now on see it."""
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)

    def upload_start(self, name: str, count: int) -> Tensor:
        """Start copying the first elements of one array only; those on the device."""
        target = self.device[name].view(-1)[:count]
        if self._device is not self._host:
            host = torch.from_numpy(self.host[name]).view(-1)[:count]
            target.copy_(host, non_blocking=True)
        return target
