"""What the cache keeps of one running sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from sessionkv.cache.chain import TokenChain
from sessionkv.cache.gap import Gap
from sessionkv.types import BlockHash, BlockRecord


@dataclass(frozen=True, slots=True)
class TailOrigin:
    """The shorter, indexed tail that a sequence continues, to be dropped once it has grown."""

    key: BlockHash
    fill: int
    block: int
    on_disk: bool


@dataclass(frozen=True, slots=True)
class StagedBlock:
    """A block that the plan being built will fill."""

    record: BlockRecord
    block: int
    seq_id: int
    disk_below: bool


@dataclass(slots=True, eq=False)
class RunningSequence:
    """Table, progress and obligations of one sequence.

    Blocks of ``table`` below ``committed // block_size`` are held and full; the others are filling
    by this sequence or by loads of its gap, but for blocks of the gap that have arrived.

    Attributes:
        committed: Tokens whose KV is written by steps that succeeded, or loaded.
        boundary: Number of tokens at which the next block is full.
        disk_below: Blocks past its first match may be on disk unseen.
        copy_source: Device block that a copy-on-write of the next plan reads; held until then.
        tail_origin: The tail it continues, in place or loaded from below.
        gap: What was found below the device and the front has not passed.
        frontier_key: Hash of the block it fills next, under which others wait for it.
        borrowers: Sequences that hold blocks which it staged and has not committed.
        lenders: The other direction.
        broken: A lender ended without committing: it can only be ended.
        looked_up: Prompt blocks it looked for, to be counted when it has run.
        hit: How many of them were found.
        settled: It has run, and the next commit inside a block changes nothing but a number.
    """

    seq_id: int
    chain: TokenChain
    table: list[int]
    committed: int
    boundary: int
    disk_below: bool
    staged: int = 0
    copy_source: int | None = None
    tail_origin: TailOrigin | None = None
    gap: Gap | None = None
    frontier_key: BlockHash | None = None
    borrowers: set[int] = field(default_factory=set)
    lenders: set[int] = field(default_factory=set)
    broken: bool = False
    looked_up: int = 0
    hit: int = 0
    settled: bool = False
