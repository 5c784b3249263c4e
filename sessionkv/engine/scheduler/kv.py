"""What the scheduler asks of the KV cache. ``sessionkv.cache.manager.KVCacheManager`` answers.

All calls are on the core thread, cost O(blocks concerned), touch no bytes and never wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from sessionkv.types import DiskReceipt, Tier
from sessionkv.types.cache import Admission, DiskQuery, Fetched, Match, Meeting
from sessionkv.types.transfers import Transfer, TransferResult


class Chain(Protocol):
    """Tokens of one sequence with their block hashes, each hashed once; opaque to the scheduler.

    ``cache.chain.TokenChain``: built by the engine from the head's hashes and the turn's delta.
    """

    @property
    def token_ids(self) -> list[int]:
        """All tokens; appended to through :meth:`append` only."""
        ...

    def append(self, token_id: int) -> None:
        """Add one sampled token; hashes a block when it completes it."""
        ...

    def __len__(self) -> int:
        """Number of tokens."""
        ...


class KVCache(Protocol):
    """Leases, block tables and matches for running sequences."""

    block_size: int
    num_blocks: int

    def match(self, chain: Chain, receipt: DiskReceipt | None = None) -> Match:
        """Longest verified prefix. A question: changes nothing.

        Sees blocks that a sequence of the plan being built will fill (:meth:`stage`).
        """
        ...

    def disk_query(self, chain: Chain) -> DiskQuery | None:
        """What to ask the store, or None when RAM holds the whole chain or disk is off."""
        ...

    def admit(
        self,
        seq_id: int,
        chain: Chain,
        match: Match,
        *,
        room_tokens: int = 0,
    ) -> Admission | None:
        """Lease what the match offers and allocate room for loads and the tail's copy.

        The table is also grown to hold ``room_tokens`` positions, as by :meth:`reserve`. An empty
        match (all counts 0) needs no ``state``: nothing is reused.

        None when the device has no room now: nothing was changed, but the shortfall is noted, and
        :meth:`plan_transfers` will make room.
        """
        ...

    def make_room(self, chain: Chain, match: Match, *, room_tokens: int, most_blocks: int) -> bool:
        """Drop what :meth:`admit` of a match needs the room of, but no more than so many blocks.

        True where it is to be admitted now, the match being good still. False where so many were
        dropped and more are to be: then the chain is to be matched again.
        """
        ...

    def advance(self, seq_id: int) -> Meeting:
        """Join what was loaded and lies before the front, and say where the two cursors stand.

        Between steps only. The disk receipt of the match is needed until the meeting is over.
        """
        ...

    def claim(self, seq_id: int, wanted: Mapping[Tier, int]) -> tuple[Transfer, ...]:
        """Take so many of the unclaimed blocks of a tier, from the back, to be loaded."""
        ...

    def reserve(self, seq_id: int, num_tokens: int) -> tuple[int, ...] | None:
        """Grow the table to hold ``num_tokens`` positions; ids of the blocks added.

        None when there is no room now: nothing was changed, the shortfall is noted.
        """
        ...

    def stage(self, seq_id: int, num_tokens: int) -> None:
        """The plan being built will write positions below ``num_tokens``.

        From here to :meth:`commit` other sequences admitted into the same plan may match the full
        blocks among them.
        """
        ...

    def unstage(self) -> None:
        """The plan is executed or dropped: blocks staged and not committed are not matchable."""
        ...

    def commit(self, seq_id: int, num_tokens: int) -> None:
        """The step succeeded: positions below ``num_tokens`` are written and may be matched."""
        ...

    def dependents(self, seq_id: int) -> tuple[int, ...]:
        """Sequences that lease, also through others, blocks ``seq_id`` staged and not committed."""
        ...

    def finish(self, seq_id: int, keep_tokens: int | None = None) -> None:
        """End the sequence's leases.

        Written blocks stay as cache; an unfilled tail becomes a partial match. ``keep_tokens``
        cuts the tail to what the log kept: slots past it are not matchable as part of it. Also
        right for a sequence that failed or was cancelled at any moment, with loads in flight or
        none: blocks with positions not committed are freed.
        """
        ...

    def preempt(self, seq_id: int) -> None:
        """As :meth:`finish`, and its blocks are next to be demoted to a lower tier."""
        ...

    def plan_transfers(self) -> list[Transfer]:
        """Spills that make room for noted shortfalls and keep a few clean blocks ahead."""
        ...

    def overdue(self, now: float) -> tuple[int, ...]:
        """Spills that nobody is to wait for any longer, each once: their tier answers nothing.

        From then on more may be dropped, until that tier answers again.
        """
        ...

    def transfers_of(self, seq_id: int) -> set[int]:
        """Transfers that bring blocks to a running sequence, neither promised nor answered."""
        ...

    def promise_transfer(self, result: TransferResult) -> Fetched | None:
        """Take in what a load is going to be answered with; its answer only ends its leases.

        All steps and copies to come must be behind its copies.
        """
        ...

    def finish_transfer(self, result: TransferResult) -> Fetched | None:
        """Take in a mover's answer; not None for a load of a running sequence."""
        ...

    def take_freed(self) -> tuple[int, ...]:
        """Device blocks that became free since the last call and still are."""
        ...

    def block_table(self, seq_id: int) -> Sequence[int]:
        """The sequence's table; a view, not to be changed."""
        ...
