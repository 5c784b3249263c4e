"""The waiting queue: who may be admitted next.

Higher class first, where waiting lifts a sequence by one class every ``ageing_s``; within a class
those that ran before, then the tenant and the session served least, then first come. Knows
nothing of blocks.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from sessionkv.engine.scheduler.fairness import Share
from sessionkv.engine.scheduler.sequence import Sequence
from sessionkv.types.holdings import Holdings

_Class = tuple[int, bool]
"""The higher one first, then those that ran before."""


class WaitingQueue:
    """Sequences that hold no blocks, in states LOOKUP and WAITING."""

    def __init__(self, *, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._sequences: dict[int, Sequence] = {}
        self._by_tenant = Holdings()
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
        self._by_tenant.add(sequence.group[0], 1)
        self.num_tokens += len(sequence.token_ids)

    def remove(self, sequence: Sequence) -> None:
        """Take it out.

        Raises:
            KeyError: It does not wait here.
        """
        del self._sequences[sequence.seq_id]
        self._by_tenant.add(sequence.group[0], -1)
        self.num_tokens -= len(sequence.token_ids)

    def num_of(self, tenant: str) -> int:
        """Sequences of a tenant."""
        return self._by_tenant.of(tenant)

    def has_room(self, tenant: str, limit: int) -> bool:
        """Whether one more of a tenant may wait, of ``limit`` that tenants share."""
        return self._by_tenant.has_room(tenant, limit)

    def priority_class(self, sequence: Sequence, now: float) -> int:
        """Its priority, lifted by one for every ``ageing_s`` since it was added."""
        return sequence.priority + int((now - sequence.accounting.added_at) / self._ageing_s)

    def in_turn(self, candidates: list[Sequence], now: float) -> Iterator[Sequence]:
        """``candidates``, best first, taking account of shares charged meanwhile.

        O(n log n) to begin, O(log n) for each taken: whoever is charged moves behind others as a
        whole, and the order of what waits under it stays.
        """
        lines: dict[tuple[_Class, Share | None], dict[Share, deque[Sequence]]] = {}
        for sequence in sorted(candidates, key=lambda sequence: sequence.arrival):
            place = -self.priority_class(sequence, now), not sequence.resumed
            share = sequence.share
            shares = lines.setdefault((place, share.parent), {})
            shares.setdefault(share, deque()).append(sequence)
        best = _Best(
            _TenantLine(place, tenant, _Best(_ShareLine(share, line) for share, line in of.items()))
            for (place, tenant), of in lines.items()
        )
        while best:
            yield best.pop()


class _Line(Protocol):
    """Sequences in their order. Its key is that of the first, and only grows."""

    def __len__(self) -> int: ...

    def key(self) -> tuple[object, ...]: ...

    def pop(self) -> Sequence: ...


_AnyLine = TypeVar("_AnyLine", bound=_Line)


class _Best(Generic[_AnyLine]):
    """Several lines, of which the one with the least key is served.

    As keys only grow, a line whose key still holds when it comes up is the best.
    """

    def __init__(self, lines: Iterable[_AnyLine]) -> None:
        self._heap = [(line.key(), line) for line in lines]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def key(self) -> tuple[object, ...]:
        while True:
            key, line = self._heap[0]
            current = line.key()
            if current == key:
                return key
            heapq.heapreplace(self._heap, (current, line))

    def pop(self) -> Sequence:
        self.key()
        line = self._heap[0][1]
        sequence = line.pop()
        if line:
            heapq.heapreplace(self._heap, (line.key(), line))
        else:
            heapq.heappop(self._heap)
        return sequence


class _ShareLine:
    """Of one session: first come, first served."""

    def __init__(self, share: Share, line: deque[Sequence]) -> None:
        self._share = share
        self._line = line

    def __len__(self) -> int:
        return len(self._line)

    def key(self) -> tuple[int, int]:
        return self._share.served, self._line[0].arrival

    def pop(self) -> Sequence:
        return self._line.popleft()


class _TenantLine:
    """Of one tenant, and of one class: the session served least."""

    def __init__(self, place: _Class, tenant: Share | None, sessions: _Best[_ShareLine]) -> None:
        self._place = place
        self._tenant = tenant
        self._sessions = sessions

    def __len__(self) -> int:
        return len(self._sessions)

    def key(self) -> tuple[object, ...]:
        served = 0 if self._tenant is None else self._tenant.served
        return (*self._place, served, *self._sessions.key())

    def pop(self) -> Sequence:
        return self._sessions.pop()
