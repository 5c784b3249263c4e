"""What changes logits before a token is chosen, on the GPU and in place: bias, penalties, masks.

For rows that ask for it only, in this order: :func:`add_at` with the biases, :func:`penalise`,
:func:`add_at` with minus infinity for ids that may not come yet, :func:`mask_tokens` with those
that may; after the choice, :func:`count_tokens`.

What penalties need to remember is one row of a *history* for each sequence that has any:
``[history_rows, vocab_size]`` int32, for each token twice the number of times it is in the output,
plus 1 if it is in the prompt. 0 is a token that was never seen. Rows belong to the caller, who
fills them with :func:`start_history`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sessionkv.kernels.arguments import FLOAT32, INT32, INT64, check_tensor

_IN_PROMPT = 1
_ONE_OUTPUT = 2
_PENALTY_TILE = 2048  # two loads of 16 bytes a thread from logits and history each
_PENALTY_WARPS = 8
_MASK_TILE = 4096  # 128 words; the logits of most are only written
_MASK_WARPS = 8
_ENTRIES_TILE = 128
_ENTRIES_WARPS = 4


@triton.jit(do_not_specialize=["num_rows"])
def _add_at(
    logits: tl.tensor,
    rows: tl.tensor,
    token_ids: tl.tensor,
    values: tl.tensor,
    count: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    entry = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.load(rows + entry, mask=entry < count, other=-1).to(tl.int64)
    inside = row >= 0
    token_id = tl.load(token_ids + entry, mask=inside, other=0)
    tl.device_assert((row >= -1) & (row < num_rows), "a row is not one of the logits")
    tl.device_assert((token_id >= 0) & (token_id < vocab_size), "a token is not in the vocabulary")
    at = logits + row * vocab_size + token_id
    value = tl.load(values + entry, mask=inside, other=0.0)
    tl.store(at, tl.load(at, mask=inside, other=0.0) + value, mask=inside)


@triton.jit(do_not_specialize=["num_histories"])
def _penalise(
    logits: tl.tensor,
    history: tl.tensor,
    history_rows: tl.tensor,
    repetition: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    num_histories: tl.tensor,
    vocab_size: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    history_row = tl.load(history_rows + row).to(tl.int64)
    is_known = (history_row >= -1) & (history_row < num_histories)
    tl.device_assert(is_known, "a row is not one of the histories")
    if history_row >= 0:
        token_id = tl.program_id(0) * TILE + tl.arange(0, TILE)
        inside = token_id < vocab_size
        at = logits + row * vocab_size + token_id
        logit = tl.load(at, mask=inside, other=0.0)
        seen = tl.load(history + history_row * vocab_size + token_id, mask=inside, other=0)
        factor = tl.load(repetition + row)
        repeated = tl.where(logit > 0, logit / factor, logit * factor)
        logit = tl.where(seen != 0, repeated, logit)
        outputs = seen >> 1
        logit -= tl.load(frequency + row) * outputs.to(tl.float32)
        logit -= tl.where(outputs > 0, tl.load(presence + row), 0.0)
        tl.store(at, logit, mask=inside & (seen != 0))


@triton.jit(do_not_specialize=["num_masks"])
def _mask_tokens(
    logits: tl.tensor,
    masks: tl.tensor,
    mask_rows: tl.tensor,
    num_masks: tl.tensor,
    num_words: tl.tensor,
    vocab_size: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    mask_row = tl.load(mask_rows + row).to(tl.int64)
    is_known = (mask_row >= -1) & (mask_row < num_masks)
    tl.device_assert(is_known, "a row is not one of the masks")
    if mask_row >= 0:
        token_id = tl.program_id(0) * TILE + tl.arange(0, TILE)
        inside = token_id < vocab_size
        word = tl.load(masks + mask_row * num_words + token_id // 32, mask=inside, other=-1)
        ruled_out = ((word >> (token_id % 32)) & 1) == 0
        at = logits + row * vocab_size + token_id
        tl.store(at, float("-inf"), mask=inside & ruled_out)


@triton.jit(do_not_specialize=["num_histories"])
def _count_tokens(
    history: tl.tensor,
    history_rows: tl.tensor,
    token_ids: tl.tensor,
    count: tl.tensor,
    num_histories: tl.tensor,
    vocab_size: tl.tensor,
    ONE_OUTPUT: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    entry = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.load(history_rows + entry, mask=entry < count, other=-1).to(tl.int64)
    inside = row >= 0
    token_id = tl.load(token_ids + entry, mask=inside, other=0)
    tl.device_assert((row >= -1) & (row < num_histories), "a row is not one of the histories")
    tl.device_assert((token_id >= 0) & (token_id < vocab_size), "a token is not in the vocabulary")
    at = history + row * vocab_size + token_id
    tl.store(at, tl.load(at, mask=inside, other=0) + ONE_OUTPUT, mask=inside)


def start_history(
    history: Tensor, row: int, *, prompt: Sequence[int], outputs: Sequence[int]
) -> None:
    """Fill the row of a sequence that starts, or starts again with earlier output.

    Args:
        history: See the module.
        row: Which; what it held is forgotten.
        prompt: Token ids.
        outputs: Token ids sampled so far.

    Cost: one pass over the row and a copy of the ids to the device.
    """
    device = history.device
    values = history[row].zero_()
    values[torch.tensor(prompt, dtype=torch.int64, device=device)] = _IN_PROMPT
    ids = torch.tensor(outputs, dtype=torch.int64, device=device)
    values.scatter_add_(0, ids, torch.full_like(ids, _ONE_OUTPUT, dtype=torch.int32))


def add_at(logits: Tensor, *, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """Add to single logits, in place.

    Args:
        logits: ``[num_rows, vocab_size]`` fp32, contiguous.
        rows: ``[n]`` int32; -1 is padding.
        token_ids: ``[n]`` int64, below the vocabulary's size; no two alike in one row.
        values: ``[n]`` fp32; minus infinity rules a token out.
    """
    check_tensor("logits", logits, (None, None), dtypes=FLOAT32, like=logits)
    count = rows.numel()
    check_tensor("rows", rows, (count,), dtypes=INT32, like=logits)
    check_tensor("token_ids", token_ids, (count,), dtypes=INT64, like=logits)
    check_tensor("values", values, (count,), dtypes=FLOAT32, like=logits)
    if count:
        _add_at[(triton.cdiv(count, _ENTRIES_TILE),)](
            logits,
            rows,
            token_ids,
            values,
            count,
            *logits.shape,
            TILE=_ENTRIES_TILE,
            num_warps=_ENTRIES_WARPS,
        )


def penalise(
    logits: Tensor,
    history: Tensor,
    *,
    history_rows: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Apply repetition, frequency and presence penalties, in place.

    Logits of tokens seen in prompt or output are divided (positive ones) or multiplied by the
    repetition penalty; those of tokens in the output then lose the frequency penalty for each time
    and the presence penalty once.

    Args:
        logits: ``[num_rows, vocab_size]`` fp32, contiguous.
        history: See the module; not changed.
        history_rows: ``[num_rows]`` int32; -1 leaves a row of logits as it is.
        repetition: ``[num_rows]`` fp32, above 0; 1 is off.
        presence: ``[num_rows]`` fp32; 0 is off.
        frequency: ``[num_rows]`` fp32; 0 is off.
    """
    check_tensor("logits", logits, (None, None), dtypes=FLOAT32, like=logits)
    num_rows, vocab_size = logits.shape
    check_tensor("history", history, (None, vocab_size), dtypes=INT32, like=logits)
    check_tensor("history_rows", history_rows, (num_rows,), dtypes=INT32, like=logits)
    for name, value in (
        ("repetition", repetition),
        ("presence", presence),
        ("frequency", frequency),
    ):
        check_tensor(name, value, (num_rows,), dtypes=FLOAT32, like=logits)
    if num_rows:
        _penalise[(triton.cdiv(vocab_size, _PENALTY_TILE), num_rows)](
            logits,
            history,
            history_rows,
            repetition,
            presence,
            frequency,
            history.shape[0],
            vocab_size,
            TILE=_PENALTY_TILE,
            num_warps=_PENALTY_WARPS,
        )


def mask_tokens(logits: Tensor, masks: Tensor, *, mask_rows: Tensor) -> None:
    """Rule out every token whose bit is not set, in place.

    Args:
        logits: ``[num_rows, vocab_size]`` fp32, contiguous.
        masks: ``[num_masks, ceil(vocab_size / 32)]`` int32, contiguous: token ``i`` is bit
            ``i % 32`` of word ``i // 32``.
        mask_rows: ``[num_rows]`` int32: each row's mask; -1 leaves a row of logits as it is.
    """
    check_tensor("logits", logits, (None, None), dtypes=FLOAT32, like=logits)
    num_rows, vocab_size = logits.shape
    num_words = triton.cdiv(vocab_size, 32)
    check_tensor("masks", masks, (None, num_words), dtypes=INT32, like=logits)
    check_tensor("mask_rows", mask_rows, (num_rows,), dtypes=INT32, like=logits)
    if num_rows:
        _mask_tokens[(triton.cdiv(vocab_size, _MASK_TILE), num_rows)](
            logits,
            masks,
            mask_rows,
            masks.shape[0],
            num_words,
            vocab_size,
            TILE=_MASK_TILE,
            num_warps=_MASK_WARPS,
        )


def count_tokens(history: Tensor, *, history_rows: Tensor, token_ids: Tensor) -> None:
    """Add the tokens that were sampled to the histories.

    Args:
        history: See the module; changed in place.
        history_rows: ``[num_rows]`` int32, no two alike; -1 counts nothing.
        token_ids: ``[num_rows]`` int64, as sampled.
    """
    check_tensor("history", history, (None, None), dtypes=INT32, like=history)
    count = history_rows.numel()
    check_tensor("history_rows", history_rows, (count,), dtypes=INT32, like=history)
    check_tensor("token_ids", token_ids, (count,), dtypes=INT64, like=history)
    if count:
        _count_tokens[(triton.cdiv(count, _ENTRIES_TILE),)](
            history,
            history_rows,
            token_ids,
            count,
            *history.shape,
            ONE_OUTPUT=_ONE_OUTPUT,
            TILE=_ENTRIES_TILE,
            num_warps=_ENTRIES_WARPS,
        )
