"""What a step tells the device: arrays at fixed addresses, one copy for each group.

The copies are made by a kernel, so that they do not wait for blocks on their way
(:mod:`sessionkv.kernels.pinned_copies`).

Each array exists on the device, for kernels to read, and twice in host memory, for numpy to write:
at the same offset of one buffer each. Fixed addresses are what lets a CUDA graph be replayed with
new values.

Invariant: what was uploaded is not written again before the device is done with it. Steps write the
two host buffers by turns, and when one is launched, the last but one before it has been collected.
On the device the stream keeps them apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from sessionkv.kernels.pinned_copies import copy_pinned

IntArray = npt.NDArray[Any]
_ALIGNMENT = 16  # kernels may load 16 bytes at once
_DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}


class StepBuffers:
    """Arrays by name. The step loop's thread only.

    Attributes:
        host: Name -> numpy array to write, from :meth:`turn` to :meth:`upload`; holds anything.
        device: Name -> tensor with the same content after :meth:`upload`.
    """

    def __init__(
        self, arrays: Mapping[str, tuple[str, tuple[int, ...]]], device: torch.device
    ) -> None:
        """Allocate, all zero.

        Args:
            arrays: Name -> dtype name and shape.
            device: Where kernels run.
        """
        offsets, end = {}, 0
        for name, (dtype, shape) in arrays.items():
            offsets[name] = end
            nbytes = math.prod(shape) * _DTYPES[dtype].itemsize
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        is_cuda = device.type == "cuda"
        self._device = torch.zeros(end, dtype=torch.uint8, device=device)
        self._hosts = [torch.zeros(end, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)]

        def views(memory: Tensor) -> dict[str, Tensor]:
            found = {}
            for name, (dtype, shape) in arrays.items():
                count = math.prod(shape) * _DTYPES[dtype].itemsize
                part = memory[offsets[name] : offsets[name] + count]
                found[name] = part.view(_DTYPES[dtype]).view(shape)
            return found

        self.device = views(self._device)
        self._arrays: list[dict[str, IntArray]] = [
            {name: part.numpy() for name, part in views(memory).items()} for memory in self._hosts
        ]
        self.host = self._arrays[0]

    def turn(self) -> None:
        """A new step begins: ``host`` is what was uploaded by the last but one."""
        self._hosts.reverse()
        self._arrays.reverse()
        self.host = self._arrays[0]

    def upload(self) -> None:
        """Start copying everything; kernels launched from now on see it."""
        copy_words(self._device, self._hosts[0])

    def upload_start(self, name: str, count: int) -> Tensor:
        """Start copying the first elements of one array only; those on the device."""
        target = self.device[name].view(-1)[:count]
        copy_words(target, torch.from_numpy(self.host[name]).view(-1)[:count])
        return target


def copy_words(target: Tensor, source: Tensor) -> None:
    """Start copying between the device and pinned host memory; whole words of 4 bytes.

    Where the device is the CPU it is a plain copy.
    """
    if target.device == source.device:
        target.copy_(source)
    else:
        copy_pinned(target, source)
