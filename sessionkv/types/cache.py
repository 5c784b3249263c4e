"""Questions to the KV cache and its answers, as plain data between scheduler and cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from sessionkv.types.blocks import BlockHash
from sessionkv.types.plan import BlockCopy
from sessionkv.types.transfers import Transfer


@dataclass(frozen=True, slots=True)
class Match:
    """Longest verified prefix of a chain, over all tiers; valid until the cache next changes.

    The three counts are tokens of one contiguous prefix, counted by the tier each block would be
    taken from; together at most the number of tokens of the chain minus one (the last token is
    always computed).

    Attributes:
        waits_for: seq_id of the running sequence that is filling the next block past the match,
            or None. The caller may wait for it instead of computing the block twice.
        waits_for_transfer: Id of a transfer that is bringing the next block in, or None.
        moved_down_at: Count of moves (see :class:`DiskQuery`) when what comes next last went from
            memory to disk; 0 where that is not known to have happened.
        state: Private to the cache that made it.
    """

    device_tokens: int
    host_tokens: int
    disk_tokens: int
    waits_for: int | None = None
    waits_for_transfer: int | None = None
    moved_down_at: int = 0
    state: object = field(default=None, compare=False, repr=False)

    @property
    def num_tokens(self) -> int:
        """Length of the matched prefix in tokens."""
        return self.device_tokens + self.host_tokens + self.disk_tokens


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence has its first blocks: leased, or allocated and being filled by ``transfers``.

    Attributes:
        block_ids: Block table that covers ``cached_tokens`` and the room asked for.
        cached_tokens: Tokens that need no computing once copies and transfers are done.
        copies: Copy-on-write of a shared tail, for the first plan the sequence is in.
        transfers: Fetches to hand to the movers; the sequence may not be planned before all have
            been answered (``KVCache.finish_transfer``).
    """

    block_ids: tuple[int, ...]
    cached_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    copies: tuple[BlockCopy, ...] = ()
    transfers: tuple[Transfer, ...] = ()


@dataclass(frozen=True, slots=True)
class Fetched:
    """A sequence's fetches are all answered.

    Where a block could not be loaded the prefix ends before it: the table shrinks to
    ``block_ids`` and the rest is computed.
    """

    seq_id: int
    block_ids: tuple[int, ...]
    cached_tokens: int
    host_tokens: int
    disk_tokens: int
    corrupt_blocks: int
    failed_blocks: int


@dataclass(frozen=True, slots=True)
class DiskQuery:
    """What the store is asked for: how far ``keys`` reach on disk after ``parent``.

    Attributes:
        keys: Full-block hashes, in order, starting at the first block that RAM lacks.
        parent: Chain hash before the first of them.
        token_ids: Prompt tokens from there on, for verifying and for matching a partial tail.
        first_token: Position of the first of ``token_ids`` in the prompt.
        in_memory: Those of ``keys`` that memory has: the chain goes on where disk lacks them.
        num_moves: How many blocks had gone from memory to disk when this was asked: the answer
            knows nothing of later ones.
    """

    keys: tuple[BlockHash, ...]
    parent: BlockHash
    token_ids: tuple[int, ...]
    first_token: int
    in_memory: frozenset[BlockHash] = frozenset()
    num_moves: int = 0
