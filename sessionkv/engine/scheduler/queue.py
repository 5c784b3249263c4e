"""The waiting queue: who may be admitted next.

Higher class first, where waiting lifts a sequence by one class every ``ageing_s``; within a class
those that ran before, then the tenant and the session served least, then first come. Knows
nothing of blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from sessionkv.engine.scheduler.sequence import Sequence

_Key = tuple[int, bool, int, int, int]


class WaitingQueue:
    """Sequences that hold no blocks, in states LOOKUP and WAITING."""

    def __init__(self, *, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._sequences: dict[int, Sequence] = {}
        self.num_tokens = 0
        """Prompt and output tokens of all that wait."""

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """In no order that matters."""
        return iter(self._sequences.values())

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait; its ``arrival`` is its place among equals."""
        self._sequences[sequence.seq_id] = sequence
        self.num_tokens += len(sequence.token_ids)

    def remove(self, sequence: Sequence) -> None:
        """Take it out.

        Raises:
            KeyError: It does not wait here.
        """
        del self._sequences[sequence.seq_id]
        self.num_tokens -= len(sequence.token_ids)

    def priority_class(self, sequence: Sequence, now: float) -> int:
        """Its priority, lifted by one for every ``ageing_s`` since it was added."""
        return sequence.priority + int((now - sequence.accounting.added_at) / self._ageing_s)

    def _key(self, sequence: Sequence, now: float) -> _Key:
        share = sequence.share
        tenant = share.parent
        return (
            -self.priority_class(sequence, now),
            not sequence.resumed,
            tenant.served if tenant is not None else 0,
            share.served,
            sequence.arrival,
        )

    def in_turn(self, candidates: list[Sequence], now: float) -> Iterator[Sequence]:
        """``candidates``, best first, taking account of shares charged meanwhile.

        Within one pass keys only grow, so an entry whose key still holds when it comes up is the
        best. O(n) to begin, O(log n) for each taken.
        """
        heap = [(self._key(sequence, now), sequence) for sequence in candidates]
        heapq.heapify(heap)
        while heap:
            key, sequence = heap[0]
            current = self._key(sequence, now)
            if current > key:
                heapq.heapreplace(heap, (current, sequence))
                continue
            heapq.heappop(heap)
            yield sequence
