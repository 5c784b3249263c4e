"""What attention over the pool is given, checked at the door.

Only what the host knows is looked at, in a few microseconds; what lies on the device, such as
lengths and block ids, is the caller's word (the kernels check it with ``TRITON_DEBUG=1``).
"""

from __future__ import annotations

from torch import Tensor

from sessionkv.kernels.arguments import FLOATS, INT32, check_tensor

MAX_HEAD_DIM = 256
"""A wider head leaves no room in registers for a tile's results."""
MAX_GROUP = 16
"""Query heads of one key head: the rows of the smallest tile."""


def check_range(name: str, value: int, low: int, high: int, *, why: str = "") -> None:
    """Refuse a number outside ``low`` to ``high``.

    Raises:
        ValueError: Naming the argument, its value and the range.
    """
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}, not {low} to {high}{why and f' ({why})'}")


def check_pool(pool: Tensor, layer: int) -> None:
    """Check the pool by itself: ``[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]``."""
    check_tensor("pool", pool, (None, None, 2, None, None, None), dtypes=FLOATS, like=pool)
    check_range("layer", layer, 0, pool.shape[1] - 1)
    head_dim = pool.shape[5]
    if head_dim % 16:
        raise ValueError(f"the pool's head_dim is {head_dim}, not a multiple of 16")
    check_range("the pool's head_dim", head_dim, 16, MAX_HEAD_DIM)


def check_queries(queries: Tensor, pool: Tensor) -> int:
    """Check queries against the pool; returns the query heads of one key head."""
    kv_heads, head_dim = pool.shape[3], pool.shape[5]
    check_rows("queries", queries, like=pool)
    if queries.shape[2] != head_dim or queries.stride(1) != head_dim:
        raise ValueError(
            f"queries have shape {list(queries.shape)} and strides {queries.stride()}; "
            f"a token's heads must be {head_dim} elements each, one after another"
        )
    group, rest = divmod(queries.shape[1], kv_heads)
    if rest:
        raise ValueError(
            f"queries have {queries.shape[1]} heads, no multiple of {kv_heads} of keys"
        )
    check_range("the query heads of a key head", group, 1, MAX_GROUP)
    return group


def check_rows(name: str, rows: Tensor, *, like: Tensor) -> None:
    """Check a float tensor ``[num_tokens, num_heads, head_dim]`` of any strides but the last."""
    if rows.ndim != 3 or rows.stride(2) != 1:
        raise ValueError(
            f"{name} has shape {list(rows.shape)} and strides {rows.stride()}; "
            "needed are three dimensions, the last contiguous"
        )
    if rows.dtype != like.dtype or rows.device != like.device:
        raise ValueError(
            f"{name} is {rows.dtype} on {rows.device}, not {like.dtype} on {like.device}"
        )


def check_batch(
    pool: Tensor,
    *,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor | None,
    max_seq_len: int,
    window: int | None,
) -> None:
    """Check a batch's tensors against each other and the pool."""
    check_tensor("seq_lens", seq_lens, (None,), dtypes=INT32, like=pool)
    num_seqs = seq_lens.shape[0]
    check_tensor("block_tables", block_tables, (num_seqs, None), dtypes=INT32, like=pool)
    if query_starts is not None:
        check_tensor("query_starts", query_starts, (num_seqs + 1,), dtypes=INT32, like=pool)
    if num_seqs:
        room = block_tables.shape[1] * pool.shape[4]
        check_range("max_seq_len", max_seq_len, 1, room, why="the room of a block table")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, not at least 1")
