"""Which rows of a prefill attend through a library's attention, and which through the paged kernel.

A library's attention wants contiguous keys and few shapes. Rows that fill a run of positions which
begins at a multiple of some thousands are a *square*: they see all positions before it in full, and
their own causally, both through the library. Other rows are cut in groups of some hundreds, whose
older positions are *covered* by the library; the newest ones, and the group's own, are the paged
kernel's. Numbers of covered positions and lengths of squares are few, therefore.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sessionkv.model.gpu_batch import PrefillRows


@dataclass(frozen=True, slots=True)
class FusedSizes:
    """What the library is called with, and from where on.

    Attributes:
        rows: Queries of a call for a group that is no square: fewer leave multiprocessors idle, as
            a tile of one head has 128 and models have tens of heads.
        min_rows: With fewer that are wanted, the paged kernel is as fast.
        pieces: Numbers of keys, falling, each a multiple of the next. A multiple of the last is
            attended to this way. Keys and values of the first still fit into an L2 cache.
        squares: Lengths of squares, likewise; none is above the first of ``pieces``, and the last
            of both is the same.
    """

    rows: int = 512
    min_rows: int = 384
    pieces: tuple[int, ...] = (8192, 4096, 2048)
    squares: tuple[int, ...] = (8192, 2048)

    @property
    def unit(self) -> int:
        """What positions are counted in."""
        return self.pieces[-1]

    def calls(self) -> Iterator[tuple[int, int, bool]]:
        """Everything the library may be called with: queries, keys, and whether it is causal."""
        for rows in (self.rows, *self.squares):
            yield from ((rows, keys, False) for keys in self.pieces)
        yield from ((length, length, True) for length in self.squares)


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring rows of one sequence that go the same way.

    Attributes:
        sequence: Its index among those of the step's prefill.
        first_row: Among all rows of the prefill.
        num_rows: Rows.
        length: Positions up to the last row's own.
        covered: Of these, the first ones that the library attends to in full; 0 is none.
        is_square: Whether it also attends to all others, which are the rows' own.
    """

    sequence: int
    first_row: int
    num_rows: int
    length: int
    covered: int
    is_square: bool = False

    @property
    def rows(self) -> slice:
        """Where its rows are."""
        return slice(self.first_row, self.first_row + self.num_rows)


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Rows that follow one another and go through the paged kernel.

    Attributes:
        rows: Where they are.
        prefill: Each piece of them as a sequence that starts at the first position that is not
            covered.
    """

    rows: slice
    prefill: PrefillRows


@dataclass(frozen=True, slots=True)
class DividedPrefill:
    """A step's prefill as all layers without a window compute it.

    Attributes:
        paged: What the paged kernel does.
        fused: What the library does: of each sequence its block table and its pieces.
    """

    paged: tuple[PagedRows, ...]
    fused: tuple[tuple[Tensor, tuple[Piece, ...]], ...]


def divide_prefill(
    prefill: PrefillRows, sizes: FusedSizes, *, block_size: int
) -> DividedPrefill | None:
    """Which rows attend through the library; None where none do.

    Args:
        prefill: The step's; its lengths are those of every sequence.
        sizes: What the library may be called with; positions are multiples of ``block_size``.
        block_size: Positions of a block.
    """
    pieces = divide_rows(prefill.lengths, sizes)
    if not any(piece.covered or piece.is_square for piece in pieces):
        return None
    fused = []
    for sequence in range(len(prefill.lengths)):
        own = tuple(p for p in pieces if p.sequence == sequence and (p.covered or p.is_square))
        if own:
            fused.append((prefill.block_tables[sequence], own))
    paged = tuple(_paged(prefill, run, block_size) for run in _runs(pieces))
    return DividedPrefill(paged, tuple(fused))


def divide_rows(lengths: Sequence[tuple[int, int]], sizes: FusedSizes) -> list[Piece]:
    """Cut the rows of each sequence into what goes the same way.

    ::

        | groups | square | square | ... | groups |
                 ^ the first multiple of the unit from the first row on

    Args:
        lengths: Rows and positions of each sequence.
        sizes: Of squares and of what is covered.
    """
    pieces: list[Piece] = []
    end_row = 0
    for sequence, (rows, length) in enumerate(lengths):
        end_row += rows
        before = end_row - length  # from a position to its row
        at = length - rows
        first = min(-(-at // sizes.unit) * sizes.unit, length)
        if length - first < sizes.unit:
            first = length
        pieces += _groups(sequence, before, at, first, sizes)
        at = first
        for size in sizes.squares:
            while length - at >= size:
                pieces.append(Piece(sequence, before + at, size, at + size, at, is_square=True))
                at += size
        pieces += _groups(sequence, before, at, length, sizes)
    return pieces


def _groups(sequence: int, before: int, start: int, end: int, sizes: FusedSizes) -> Iterator[Piece]:
    """Cut rows of positions ``start`` to ``end`` where another number of positions is covered."""
    begin = start  # where rows that are not covered started
    for at in range(start, end, sizes.rows):
        stop = min(at + sizes.rows, end)
        covered = at // sizes.unit * sizes.unit
        if stop - at < sizes.min_rows or not covered:
            continue
        if begin < at:
            yield Piece(sequence, before + begin, at - begin, at, 0)
        yield Piece(sequence, before + at, stop - at, stop, covered)
        begin = stop
    if begin < end:
        yield Piece(sequence, before + begin, end - begin, end, 0)


def _runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces that are no squares, those together between which there is none."""
    run: list[Piece] = []
    for piece in pieces:
        if not piece.is_square:
            run.append(piece)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _paged(prefill: PrefillRows, pieces: Sequence[Piece], block_size: int) -> PagedRows:
    """Pieces that follow one another, as sequences without the positions that are covered."""
    device = prefill.seq_lens.device
    first_row, end_row = pieces[0].first_row, pieces[-1].rows.stop
    numbers = [
        [piece.sequence for piece in pieces] + [0],
        [piece.covered // block_size for piece in pieces] + [0],
        [piece.length - piece.covered for piece in pieces] + [0],
        [piece.first_row - first_row for piece in pieces] + [end_row - first_row],
    ]
    # Pinned and not waited for: the host may be a step ahead of the device.
    host = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
    sequences, first_blocks, seq_lens, starts = host.to(device, non_blocking=True)
    lengths = tuple((piece.num_rows, piece.length - piece.covered) for piece in pieces)
    width = -(-max(positions for _, positions in lengths) // block_size)
    blocks = first_blocks[:-1, None] + torch.arange(width, dtype=torch.int32, device=device)
    blocks.clamp_(max=prefill.block_tables.shape[1] - 1)  # what is past a length is not read
    tables = prefill.block_tables[sequences[:-1, None], blocks]
    return PagedRows(slice(first_row, end_row), PrefillRows(tables, starts, seq_lens[:-1], lengths))
