"""Where a session's blocks are, from the start of its log on: a picture for people.

Memory is known here; what of the rest is on disk the store says, without leasing or reading
anything. The two are of two moments, so a block that moves meanwhile may be shown where it was.
Core thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sessionkv.cache.turns import HeadId
from sessionkv.engine.messages import CallDone
from sessionkv.engine.parts import CoreParts
from sessionkv.errors import Overloaded
from sessionkv.store.answers import Held
from sessionkv.types import BlockHash, Tier

MAX_RUNS = 256
NOWHERE = "nowhere"


class PlacesDesk:
    """Answers :class:`~sessionkv.ipc.messages.Places`, in two parts: ask the store, then say."""

    def __init__(self, parts: CoreParts) -> None:
        self._parts = parts
        self._asked: dict[int, list[BlockHash]] = {}

    def ask(self, call_id: int, head_id: HeadId) -> None:
        """Have the store look for what is not in memory. O(history).

        Raises:
            SessionNotFound: There is no such session.
            SessionDamaged: It cannot be read.
        """
        keys = self._keys(head_id)
        self._asked[call_id] = keys
        self._parts.store.search(call_id, [k for k in keys if not self._parts.kv.tiers_of(k)])

    def answer(self, held: Held) -> CallDone:
        """The answer to a call, once the store has looked; each block counts by its fastest place.

        An error where the store cannot tell now.

        Raises:
            KeyError: The call was answered before.
        """
        keys = self._asked.pop(held.ticket)
        if held.keys is None:
            busy = Overloaded("the disk tier has too many questions to answer", retry_after_s=1.0)
            return CallDone(held.ticket, error=busy)
        places = [self._place(key, held.keys) for key in keys]
        geometry = self._parts.runner.geometry
        value: dict[str, Any] = {
            "block_tokens": geometry.block_size,
            "block_bytes": geometry.block_bytes,
            "blocks": len(places),
            "counts": dict(Counter(places)),
            "runs": [list(run) for run in runs(places)],
        }
        return CallDone(held.ticket, value)

    def _keys(self, head_id: HeadId) -> list[BlockHash]:
        """Keys of the blocks that hold the session's KV, in order.

        The last tokens of the log have no KV yet, so its last full block may be no block so far.
        """
        tree = self._parts.tree
        node_id = tree.head(*head_id).node_id
        num_written = tree.num_tokens(node_id) - tree.record(node_id).num_unwritten_tokens
        keys = tree.hashes_of(node_id)[: num_written // self._parts.kv.block_size]
        tail = tree.tail_of(node_id)
        return keys if tail is None else [*keys, tail]

    def _place(self, key: BlockHash, on_disk: frozenset[BlockHash]) -> str:
        tiers = self._parts.kv.tiers_of(key)
        if tiers:
            return min(tiers, key=lambda tier: tier.rank).value
        return Tier.DISK.value if key in on_disk else NOWHERE


def runs(places: Sequence[str], most: int = MAX_RUNS) -> list[tuple[str, int]]:
    """Neighbours in the same place as one ``(place, count)`` each.

    Past ``most`` of them so many blocks at a time count as where the most of them are, and of two
    places that have as many the first.
    """
    found = _merged([(place, 1) for place in places])
    if len(found) <= most:
        return found
    width = -(-len(places) // most)
    parts = [places[start : start + width] for start in range(0, len(places), width)]
    return _merged([(Counter(part).most_common(1)[0][0], len(part)) for part in parts])


def _merged(items: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    merged: list[tuple[str, int]] = []
    for place, count in items:
        if merged and merged[-1][0] == place:
            merged[-1] = (place, merged[-1][1] + count)
        else:
            merged.append((place, count))
    return merged
