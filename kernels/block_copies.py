"""Copies of blocks on the GPU: slots from block to block, whole extents to and from a buffer.

A block is one contiguous extent, so these move words of 8 bytes (4 where a head's row is no
multiple of that) and know of no dtype. Offsets are 64 bits: a pool may hold more than 2**31
elements. Copies are exact.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sessionkv.kernels.arguments import INT64, check_tensor

_SLOTS_TILE = 512  # words: the slots of one key head of a usual block (16 of 128 in 16 bits)
_SLOTS_WARPS = 4
# Words of one turn of a program that moves extents: 8 loads of 16 bytes in flight for each of its
# threads, so that a few programs fill a PCIe link whose answers take microseconds.
_MOVE_TILE = 4096
_MOVE_WARPS = 8


@triton.jit(do_not_specialize=["num_pool_blocks"])
def _copy_slots(
    pool: tl.tensor,
    copies: tl.tensor,
    block_words: tl.tensor,
    num_pool_blocks: tl.tensor,
    HEAD_WORDS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """The first slots of one key or value head of one layer; slots of a head adjoin."""
    entry = copies + tl.program_id(0) * 3
    source_block = tl.load(entry)
    target_block = tl.load(entry + 1)
    words = tl.load(entry + 2) * ROW_WORDS
    lowest, highest = tl.minimum(source_block, target_block), tl.maximum(source_block, target_block)
    tl.device_assert((lowest >= 0) & (highest < num_pool_blocks), "a block is not in the pool")
    tl.device_assert((words >= 0) & (words <= HEAD_WORDS), "a copy is longer than a block")
    head = pool + tl.program_id(1) * HEAD_WORDS
    source = head + source_block * block_words
    target = head + target_block * block_words
    for start in range(0, HEAD_WORDS, TILE):
        word = start + tl.arange(0, TILE)
        inside = word < words
        tl.store(target + word, tl.load(source + word, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["num_pool_blocks"])
def _move_extents(
    pool: tl.tensor,
    block_ids: tl.tensor,
    buffer: tl.tensor,
    num_blocks: tl.tensor,
    block_words: tl.tensor,
    num_pool_blocks: tl.tensor,
    TO_POOL: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Tiles of all extents by turns, so that few programs share any number of blocks evenly."""
    tiles = tl.cdiv(block_words, TILE)
    for turn in range(tl.program_id(0), num_blocks * tiles, tl.num_programs(0)):
        entry = turn // tiles
        block = tl.load(block_ids + entry)
        tl.device_assert((block >= -1) & (block < num_pool_blocks), "a block is not in the pool")
        word = turn % tiles * TILE + tl.arange(0, TILE)
        inside = word < tl.where(block >= 0, block_words, 0)
        in_pool = pool + block * block_words + word
        in_buffer = buffer + entry.to(tl.int64) * block_words + word
        if TO_POOL:
            tl.store(in_pool, tl.load(in_buffer, mask=inside), mask=inside)
        else:
            tl.store(in_buffer, tl.load(in_pool, mask=inside), mask=inside)


def copy_block_slots(pool: Tensor, copies: Tensor) -> None:
    """Copy the first slots of blocks into other blocks, over all layers, in one launch.

    Args:
        pool: ``[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]``, contiguous, any
            dtype; written in place.
        copies: ``[n, 3]`` int64, on the pool's device: source block, target block, number of
            tokens, up to the block size; 0 copies nothing and is how a list is padded. No target
            may be a source or target of another copy.
    """
    _check_pool(pool)
    check_tensor("copies", copies, (None, 3), dtypes=INT64, like=pool)
    words = pool.view(_word(pool.shape[-1] * pool.element_size()))
    _, num_layers, _, kv_heads, block_size, row_words = words.shape
    if copies.shape[0]:
        head_words = block_size * row_words
        _copy_slots[(copies.shape[0], num_layers * 2 * kv_heads)](
            words,
            copies,
            words.stride(0),
            words.shape[0],
            HEAD_WORDS=head_words,
            ROW_WORDS=row_words,
            TILE=min(_SLOTS_TILE, triton.next_power_of_2(head_words)),
            num_warps=_SLOTS_WARPS,
        )


def gather_blocks(pool: Tensor, block_ids: Tensor, out: Tensor, *, programs: int = 8) -> None:
    """Copy whole blocks out of the pool into contiguous memory.

    Args:
        pool: See :func:`copy_block_slots`.
        block_ids: ``[n]`` int64, on the pool's device; -1 leaves its place in ``out`` as it is.
        out: ``n`` extents of any dtype and shape, contiguous; on the pool's device, or pinned host
            memory that the device can reach.
        programs: How many multiprocessors take part. 8 keep up with PCIe 5 x16 and leave the rest
            to computing; between device buffers, more are faster.
    """
    _move(pool, block_ids, out, programs, to_pool=False)


def scatter_blocks(pool: Tensor, block_ids: Tensor, source: Tensor, *, programs: int = 8) -> None:
    """Copy whole blocks from contiguous memory into the pool.

    Args:
        pool: See :func:`copy_block_slots`.
        block_ids: ``[n]`` int64, on the pool's device, no two alike; -1 is not written.
        source: As ``out`` of :func:`gather_blocks`.
        programs: See there.
    """
    _move(pool, block_ids, source, programs, to_pool=True)


def _move(pool: Tensor, block_ids: Tensor, buffer: Tensor, programs: int, *, to_pool: bool) -> None:
    _check_pool(pool)
    check_tensor("block_ids", block_ids, (None,), dtypes=INT64, like=pool)
    block_bytes = math.prod(pool.shape[1:]) * pool.element_size()
    count = block_ids.shape[0]
    if buffer.nbytes != count * block_bytes or not buffer.is_contiguous():
        raise ValueError(
            f"the buffer has {buffer.nbytes} bytes with strides {buffer.stride()}, not {count} "
            f"contiguous extents of {block_bytes}"
        )
    if buffer.device != pool.device and not buffer.is_pinned():
        raise ValueError(f"the buffer is on {buffer.device}, out of reach from {pool.device}")
    if programs < 1:
        raise ValueError(f"programs is {programs}, not at least 1")
    if count:
        word = _word(block_bytes)
        _move_extents[(programs,)](
            pool.view(-1).view(word),
            block_ids,
            buffer.view(-1).view(word),
            count,
            block_bytes // word.itemsize,
            pool.shape[0],
            TO_POOL=to_pool,
            TILE=_MOVE_TILE,
            num_warps=_MOVE_WARPS,
        )


def _check_pool(pool: Tensor) -> None:
    check_tensor("pool", pool, (None, None, 2, None, None, None), dtypes=(pool.dtype,), like=pool)


def _word(nbytes: int) -> torch.dtype:
    """The widest integer that divides so many bytes."""
    if nbytes % 8 == 0:
        return torch.int64
    if nbytes % 4 == 0:
        return torch.int32
    raise ValueError(f"rows of {nbytes} bytes are no whole number of 4-byte words")
