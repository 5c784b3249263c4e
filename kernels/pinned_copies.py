"""Small copies between a device and pinned host memory, made by a kernel.

For what a step brings and takes. A copy engine of the device goes on with one queue while that has
work: on an H200 a copy of 64 KiB waited for all blocks that were queued the same way, 61 ms beside
1,500 of them, however few of these were queued at a time. Loads and stores of a kernel share the
bus with such copies instead: 0.05 ms.

The host sees what was written once an event behind the kernel has happened. Copies are exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Words of a program: 8 loads in flight for each thread, as the bus answers after microseconds.
_TILE = 1024
_WARPS = 4
_WORD = torch.int32
"""One width for everything: nothing is compiled when a step is the first with some length."""
_ALIGNMENT = 16
"""Of addresses, in bytes: Triton makes another variant of a kernel for one that is not."""


@triton.jit(do_not_specialize=["num_words"])
def _copy_words(
    target: tl.tensor, source: tl.tensor, num_words: tl.tensor, TILE: tl.constexpr
) -> None:
    """A tile of words."""
    word = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = word < num_words
    tl.store(target + word, tl.load(source + word, mask=inside), mask=inside)


def copy_pinned(target: Tensor, source: Tensor) -> None:
    """Copy on the current stream, in one launch.

    For what takes the bus no time beside a step. Mostly that is less than some hundred KiB. The
    largest are tables, 4 bytes for each sequence and each block of the longest: 8 MiB where 256 go
    beside one of 131,072 tokens in blocks of 16, or 0.2 ms on a bus of 50 GB/s. Attention over that
    longest alone takes some 4 ms (8B shape, H200), and an ordinary copy would have to wait.

    Args:
        target: Any dtype and shape, contiguous, of whole words of 4 bytes, aligned to 16 bytes; on
            the device, or pinned host memory that it can reach. Written in place.
        source: Likewise, of as many bytes.

    Raises:
        ValueError: Lengths differ, or something is no whole number of words, not contiguous, not
            aligned or out of reach.
    """
    if target.nbytes != source.nbytes or target.nbytes % _WORD.itemsize:
        raise ValueError(f"{source.nbytes} bytes cannot be copied to {target.nbytes} in words")
    for name, tensor in (("target", target), ("source", source)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")
        if tensor.data_ptr() % _ALIGNMENT:
            raise ValueError(
                f"{name} is at {tensor.data_ptr():#x}; it must be aligned to {_ALIGNMENT} bytes"
            )
    num_words = target.nbytes // _WORD.itemsize
    if num_words:
        _copy_words[(triton.cdiv(num_words, _TILE),)](
            _words(target), _words(source), num_words, TILE=_TILE, num_warps=_WARPS
        )


def _words(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(_WORD)
