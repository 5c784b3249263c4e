"""Checks of tensor arguments at a kernel's door: compiled code would read past a wrong one.

They look at shapes, dtypes and devices only, which costs about a microsecond a tensor and never
waits for the device. Block ids, slots, rows and tokens lie on the device: the kernels check them
themselves, before they form an address, when they are compiled with ``TRITON_DEBUG=1``. Without it
Triton drops these checks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INT32 = (torch.int32,)
INT64 = (torch.int64,)
FLOAT32 = (torch.float32,)


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    *,
    dtypes: Sequence[torch.dtype],
    like: Tensor,
) -> None:
    """Refuse a tensor that a kernel cannot take.

    Args:
        name: Of the argument, for the error.
        tensor: It must be contiguous.
        shape: What it must be; None is any size.
        dtypes: Those allowed.
        like: It must be on this one's device.

    Raises:
        ValueError: Naming the argument, what it is and what is allowed.
    """
    actual = tensor.shape
    if len(actual) != len(shape) or any(
        want is not None and want != got for want, got in zip(shape, actual, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(actual)}, not [{wanted}]")
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} is {tensor.dtype}, not {allowed}")
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, not on {like.device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")
