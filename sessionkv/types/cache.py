"""Questions to the KV cache and its answers, as plain data between scheduler and cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sessionkv.types.blocks import BlockHash, Tier
from sessionkv.types.plan import BlockCopy
from sessionkv.types.reports import MissReason


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
    """A sequence has its blocks: leased, or allocated and to be filled.

    Attributes:
        block_ids: Block table that covers ``found_tokens`` and the room asked for.
        device_tokens: Tokens at the beginning whose KV is there once copies are done.
        found_tokens: Tokens at the beginning that were found in any tier. Where that is more than
            ``device_tokens``, the rest is brought in by loads and computing, which meet
            (``KVCache.advance``).
        copies: Copy-on-write of a shared tail, for the first plan the sequence is in.
    """

    block_ids: tuple[int, ...]
    device_tokens: int
    found_tokens: int
    copies: tuple[BlockCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where a sequence's two cursors stand: computing from the front, loads from the back.

    Attributes:
        front_tokens: Positions below it hold KV.
        joined: What has arrived and was found at the front now: tokens by tier, in order.
        end_tokens: Where the found prefix ends.
        limit_tokens: Where computing has to stop, as what comes there is loaded or on its way; None
            where nothing does.
        unclaimed: By tier, positions in the table of blocks that neither cursor has taken,
            ascending; those below the front do not count. A view, valid until the next change.
        loading: By tier, how many blocks of the sequence are on their way.
        over: Nothing of the found prefix lies ahead of the front.
    """

    front_tokens: int
    joined: tuple[tuple[Tier, int], ...] = ()
    end_tokens: int = 0
    limit_tokens: int | None = None
    unclaimed: Mapping[Tier, Sequence[int]] = field(default_factory=dict)
    loading: Mapping[Tier, int] = field(default_factory=dict)
    over: bool = False


@dataclass(frozen=True, slots=True)
class Fetched:
    """A load of a running sequence was answered.

    Attributes:
        num_blocks: Blocks that arrived.
        lost: Position in the table of each that did not, and why; they have to be computed.
    """

    seq_id: int
    num_blocks: int
    lost: Mapping[int, MissReason] = field(default_factory=dict)


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
