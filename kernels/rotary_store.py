"""Between projection and attention, on the GPU, in one pass over the projected heads.

Queries and keys are normalised (in families that do) and turned to their positions (RoFormer,
arXiv:2104.09864; pairs are half a head apart, as Hugging Face checkpoints have them). Keys and
values go into the pool of blocks, queries come back in memory of their own. Arithmetic is fp32 with
one rounding at the end: within one rounding of an exact result (fp32: 1e-5).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sessionkv.kernels.arguments import FLOAT32, FLOATS, INT64, check_tensor
from sessionkv.kernels.early_launch import let_next_start, starts_early, wait_for_earlier

MAX_HEAD_DIM = 256
# A program takes so many heads of one token: few enough that one token keeps several
# multiprocessors busy, enough that thousands of tokens do not become too many small programs.
_HEADS = 8
_PER_WARP = 256  # elements of each half: one load of 16 bytes a thread in 16 bits


@triton.jit(do_not_specialize=["layer", "num_positions", "num_slots"])
def _rotate_and_store(
    qkv: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    cos_sin: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    queries: tl.tensor,
    pool: tl.tensor,
    layer: tl.tensor,
    block_stride: tl.tensor,
    num_positions: tl.tensor,
    num_slots: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Some heads of one token, as two tiles: first and second half. ``HALF``: power of two."""
    let_next_start(EARLY)
    half_dim: tl.constexpr = HEAD_DIM // 2
    all_heads: tl.constexpr = NUM_HEADS + 2 * KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, HALF)
    is_query = (head < NUM_HEADS)[:, None]
    is_value = (head >= NUM_HEADS + KV_HEADS)[:, None]
    in_half = dim < half_dim
    inside = (head < all_heads)[:, None] & in_half[None, :]

    position = tl.load(positions + token)
    is_known = (position >= 0) & (position < num_positions)
    tl.device_assert(is_known, "a position is not one of the table of angles")
    angle = cos_sin + position * HEAD_DIM + dim
    cos = tl.load(angle, mask=in_half, other=0.0)[None, :]
    sin = tl.load(angle + half_dim, mask=in_half, other=0.0)[None, :]
    slot = tl.load(slots + token)
    tl.device_assert((slot >= -1) & (slot < num_slots), "a slot is not in the pool")
    wait_for_earlier(EARLY)

    source = qkv + (token * all_heads + head[:, None]) * HEAD_DIM + dim[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half_dim, mask=inside, other=0.0).to(tl.float32)

    if q_norm is not None:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        q_first = tl.load(q_norm + dim, mask=in_half, other=0.0).to(tl.float32)[None, :]
        q_second = tl.load(q_norm + half_dim + dim, mask=in_half, other=0.0).to(tl.float32)[None, :]
        k_first = tl.load(k_norm + dim, mask=in_half, other=0.0).to(tl.float32)[None, :]
        k_second = tl.load(k_norm + half_dim + dim, mask=in_half, other=0.0).to(tl.float32)[None, :]
        first = tl.where(is_value, first, first * scale * tl.where(is_query, q_first, k_first))
        second = tl.where(is_value, second, second * scale * tl.where(is_query, q_second, k_second))

    turned_first = tl.where(is_value, first, first * cos - second * sin)
    turned_second = tl.where(is_value, second, second * cos + first * sin)

    turned_first = turned_first.to(pool.dtype.element_ty)
    turned_second = turned_second.to(pool.dtype.element_ty)
    to_queries = queries + (token * NUM_HEADS + head[:, None]) * HEAD_DIM + dim[None, :]
    tl.store(to_queries, turned_first, mask=inside & is_query)
    tl.store(to_queries + half_dim, turned_second, mask=inside & is_query)

    # Keys, then values, of all key heads adjoin in a layer, in the order of `qkv`.
    first_stored = tl.where(slot >= 0, NUM_HEADS, all_heads)
    stored = inside & (head >= first_stored)[:, None]
    group = layer * (2 * KV_HEADS) + head - NUM_HEADS
    cell = (group * BLOCK_SIZE)[:, None] + slot % BLOCK_SIZE
    to_pool = pool + slot // BLOCK_SIZE * block_stride + cell * HEAD_DIM + dim[None, :]
    tl.store(to_pool, turned_first, mask=stored)
    tl.store(to_pool + half_dim, turned_second, mask=stored)


def rotate_and_store(
    qkv: Tensor,
    *,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    pool: Tensor,
    layer: int,
) -> Tensor:
    """Normalise and rotate queries and keys of new tokens, and write keys and values to the pool.

    Args:
        qkv: ``[tokens, num_heads + 2 * kv_heads, head_dim]``: queries, keys, values; contiguous, in
            the pool's dtype; not changed.
        positions: ``[tokens]`` int64, below the length of ``cos_sin`` also in padding rows.
        slots: ``[tokens]`` int64: ``block_id * block_size + slot``, no two alike; -1 is a padding
            row, of which nothing is written to the pool.
        cos_sin: ``[positions, head_dim]`` fp32: the cosine of each pair, then the sine.
        q_norm: ``[head_dim]``, the weight of the queries' RMS normalisation; None is none.
        k_norm: The keys'; None exactly where ``q_norm`` is.
        eps: Of both.
        pool: ``[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]``, contiguous; written
            in place.
        layer: Index of the layer.

    Returns:
        The queries, ``[tokens, num_heads, head_dim]``, new and contiguous.
    """
    check_tensor("pool", pool, (None, None, 2, None, None, None), dtypes=FLOATS, like=qkv)
    num_blocks, num_layers, _, kv_heads, block_size, head_dim = pool.shape
    check_tensor("qkv", qkv, (None, None, head_dim), dtypes=(pool.dtype,), like=pool)
    tokens, all_heads, _ = qkv.shape
    num_heads = all_heads - 2 * kv_heads
    check_tensor("positions", positions, (tokens,), dtypes=INT64, like=pool)
    check_tensor("slots", slots, (tokens,), dtypes=INT64, like=pool)
    check_tensor("cos_sin", cos_sin, (None, head_dim), dtypes=FLOAT32, like=pool)
    if num_heads <= 0:
        raise ValueError(f"qkv has {all_heads} heads, of which 2 * {kv_heads} are keys and values")
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise ValueError(f"heads of {head_dim} are not even or above {MAX_HEAD_DIM}")
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer {layer} is not one of the pool's {num_layers}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm are given or absent together")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            check_tensor(name, norm, (head_dim,), dtypes=FLOATS, like=pool)
    queries = torch.empty((tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens:
        half = triton.next_power_of_2(head_dim // 2)
        early = starts_early(qkv)
        _rotate_and_store[(tokens, triton.cdiv(all_heads, _HEADS))](
            qkv,
            positions,
            slots,
            cos_sin,
            q_norm,
            k_norm,
            queries,
            pool,
            layer,
            pool.stride(0),
            cos_sin.shape[0],
            num_blocks * block_size,
            eps,
            NUM_HEADS=num_heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            HALF=half,
            HEADS=_HEADS,
            EARLY=early,
            num_warps=max(1, _HEADS * half // _PER_WARP),
            launch_pdl=early,
        )
    return queries
