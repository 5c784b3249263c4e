"""Launches with one index each that may be wrong, to see whether the kernels tell.

``python -m tests.builders.indexed NAME`` runs one of them on the GPU with an index that is wrong,
which leaves the process without a usable device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sessionkv.kernels.attention_parts import gather_kv_layer
from sessionkv.kernels.block_copies import copy_block_slots, gather_blocks, scatter_blocks
from sessionkv.kernels.logit_changes import add_at, count_tokens, mask_tokens, penalise
from sessionkv.kernels.paged_decode import paged_decode
from sessionkv.kernels.paged_prefill import paged_prefill
from sessionkv.kernels.rotary_store import rotate_and_store

BLOCKS, BLOCK_SIZE, HEAD_DIM, ROWS, VOCAB = 4, 8, 64, 3, 70


@dataclass(frozen=True)
class Indexed:
    """One index of one kernel.

    Attributes:
        launch: Runs the kernel with it, on a device.
        good: The lowest and the highest that are right.
        message: Of the check.
    """

    launch: Callable[[int, torch.device], object]
    good: tuple[int, int]
    message: str

    @property
    def bad(self) -> tuple[int, int]:
        """The nearest that are wrong."""
        return self.good[0] - 1, self.good[1] + 1


def _pool(device: torch.device) -> Tensor:
    return torch.ones((BLOCKS, 1, 2, 1, BLOCK_SIZE, HEAD_DIM), device=device)


def _ints(*values: int, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _store(device: torch.device, *, position: int = 0, slot: int = 0) -> None:
    rotate_and_store(
        torch.ones((1, 3, HEAD_DIM), device=device),
        positions=torch.tensor([position], device=device),
        slots=torch.tensor([slot], device=device),
        cos_sin=torch.ones((9, HEAD_DIM), device=device),
        q_norm=None,
        k_norm=None,
        eps=1e-6,
        pool=_pool(device),
        layer=0,
    )


def _decode(device: torch.device, *, block: int = 0, length: int = 9) -> None:
    tables = _ints(0, block, device=device)[None]
    queries, lengths = torch.ones((1, 1, HEAD_DIM), device=device), _ints(length, device=device)
    paged_decode(
        queries, _pool(device), 0, block_tables=tables, seq_lens=lengths, max_seq_len=2 * BLOCK_SIZE
    )


def _prefill(device: torch.device, *, block: int = 0, end: int = 2) -> None:
    paged_prefill(
        torch.ones((5, 1, HEAD_DIM), device=device),
        _pool(device),
        0,
        block_tables=_ints(0, block, device=device)[None],
        query_starts=_ints(0, end, device=device),
        seq_lens=_ints(9, device=device),
        max_query_len=5,
        max_seq_len=9,
    )


def _gather(block: int, device: torch.device) -> None:
    out = torch.empty((2, 1, 9, HEAD_DIM), device=device)
    table = _ints(0, block, device=device)
    gather_kv_layer(_pool(device), 0, block_table=table, num_tokens=9, out=out)


def _copy(device: torch.device, *, source: int = 1, target: int = 0, count: int = 1) -> None:
    copies = torch.tensor([[0, 0, 0], [source, target, count]], device=device)
    copy_block_slots(_pool(device), copies)


def _move(
    move: Callable[[Tensor, Tensor, Tensor], None],
) -> Callable[[int, torch.device], None]:
    def launch(block: int, device: torch.device) -> None:
        pool = _pool(device)
        move(pool, torch.tensor([block], device=device), torch.ones_like(pool[:1]))

    return launch


def _add(device: torch.device, *, row: int = 0, token: int = 0) -> None:
    add_at(
        torch.ones((ROWS, VOCAB), device=device),
        rows=_ints(row, device=device),
        token_ids=torch.tensor([token], device=device),
        values=torch.ones(1, device=device),
    )


def _penalise(row: int, device: torch.device) -> None:
    penalise(
        torch.ones((1, VOCAB), device=device),
        _ints(*[0] * ROWS * VOCAB, device=device).view(ROWS, VOCAB),
        history_rows=_ints(row, device=device),
        **{n: torch.ones(1, device=device) for n in ("repetition", "presence", "frequency")},
    )


def _count(device: torch.device, *, row: int = 0, token: int = 0) -> None:
    history = _ints(*[0] * ROWS * VOCAB, device=device).view(ROWS, VOCAB)
    rows, tokens = _ints(row, device=device), torch.tensor([token], device=device)
    count_tokens(history, history_rows=rows, token_ids=tokens)


def _mask(row: int, device: torch.device) -> None:
    masks = _ints(*[1] * ROWS * 3, device=device).view(ROWS, 3)
    mask_tokens(torch.ones((1, VOCAB), device=device), masks, mask_rows=_ints(row, device=device))


_BLOCK, _TOKEN = "a block is not in the pool", "a token is not in the vocabulary"
_BLOCK_IDS, _TOKEN_IDS, _ROW_IDS = (0, BLOCKS - 1), (0, VOCAB - 1), (-1, ROWS - 1)
_HISTORY = "a row is not one of the histories"
INDEXED = {
    "slot": Indexed(
        lambda i, on: _store(on, slot=i), (-1, BLOCKS * BLOCK_SIZE - 1), "a slot is not in the pool"
    ),
    "position": Indexed(
        lambda i, on: _store(on, position=i), (0, 8), "a position is not one of the table of angles"
    ),
    "decoded block": Indexed(lambda i, on: _decode(on, block=i), _BLOCK_IDS, _BLOCK),
    "length": Indexed(
        lambda i, on: _decode(on, length=i),
        (0, 2 * BLOCK_SIZE),
        "a sequence is longer than its block table",
    ),
    "prefilled block": Indexed(lambda i, on: _prefill(on, block=i), _BLOCK_IDS, _BLOCK),
    "query end": Indexed(
        lambda i, on: _prefill(on, end=i), (0, 5), "a sequence ends before|rows of"
    ),
    "gathered block": Indexed(_gather, _BLOCK_IDS, _BLOCK),
    "copied block": Indexed(lambda i, on: _copy(on, source=i), _BLOCK_IDS, _BLOCK),
    "copy's target": Indexed(lambda i, on: _copy(on, target=i), _BLOCK_IDS, _BLOCK),
    "copy's length": Indexed(
        lambda i, on: _copy(on, count=i), (0, BLOCK_SIZE), "a copy is longer than a block"
    ),
    "block moved out": Indexed(_move(gather_blocks), (-1, BLOCKS - 1), _BLOCK),
    "block moved in": Indexed(_move(scatter_blocks), (-1, BLOCKS - 1), _BLOCK),
    "row of logits": Indexed(
        lambda i, on: _add(on, row=i), _ROW_IDS, "a row is not one of the logits"
    ),
    "token of logits": Indexed(lambda i, on: _add(on, token=i), _TOKEN_IDS, _TOKEN),
    "penalised row": Indexed(_penalise, _ROW_IDS, _HISTORY),
    "masked row": Indexed(_mask, _ROW_IDS, "a row is not one of the masks"),
    "counted row": Indexed(lambda i, on: _count(on, row=i), _ROW_IDS, _HISTORY),
    "counted token": Indexed(lambda i, on: _count(on, token=i), _TOKEN_IDS, _TOKEN),
}

if __name__ == "__main__":
    cuda = torch.device("cuda", 0)
    chosen = INDEXED[sys.argv[1]]
    for index in chosen.good:
        chosen.launch(index, cuda)
    torch.cuda.synchronize()
    sys.stderr.write("all is well so far\n")
    chosen.launch(chosen.bad[1], cuda)
    torch.cuda.synchronize()
