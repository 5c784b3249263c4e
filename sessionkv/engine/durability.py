"""When a turn's blocks are written to disk, and which turns are answered only then.

=========  ============================================================================
``turn``   written at the turn's end; its terminal event goes out when they are on disk
``idle``   written from the turn's end on; nobody waits
``evict``  written ahead of leaving memory, by eviction or at the engine's end
``off``    never written, but on ``flush``
=========  ============================================================================

The journal has the turn in any case. What the disk does not take, or not within
:data:`WRITE_WAIT_S`, is not waited for: KV is a cache, and the next turn is slower. Core thread
only.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict

from sessionkv.engine.commits import PendingCommit
from sessionkv.engine.parts import CoreParts
from sessionkv.engine.turns import TurnDesk
from sessionkv.errors import NodeNotFound
from sessionkv.types import BlockHash

_log = logging.getLogger(__name__)

WRITE_WAIT_S = 10.0
"""How long a turn's answer may wait for its blocks."""


class DurabilityDesk:
    """Turns that are in the journal and whose blocks may be on their way to disk."""

    def __init__(self, parts: CoreParts, turns: TurnDesk) -> None:
        self._parts = parts
        self._turns = turns
        self._policy = parts.config.cache.durability
        self._held: OrderedDict[int, tuple[tuple[BlockHash, ...], float]] = OrderedDict()

    def __len__(self) -> int:
        """Turns that wait for their blocks."""
        return len(self._held)

    def journalled(self, commit: PendingCommit, now: float) -> None:
        """The journal has a turn: have its blocks written, and answer it now or when they are."""
        turn_id = commit.turn_id
        if turn_id is None:
            raise ValueError("the commit is of no turn")
        keys = self._request(commit) if self._policy in ("turn", "idle") else ()
        if self._policy == "turn" and self._parts.kv.any_unwritten(keys):
            self._held[turn_id] = keys, now + WRITE_WAIT_S
        else:
            self._turns.durable(turn_id, now)

    def _request(self, commit: PendingCommit) -> tuple[BlockHash, ...]:
        node_id = commit.change.node_id
        if node_id is None:
            return ()
        # The session may have been deleted while its turn was on its way to the journal.
        with contextlib.suppress(NodeNotFound):
            keys = (*commit.recomputed, *self._parts.tree.keys_of(node_id))
            self._parts.kv.request_clean(keys)
            return keys
        return ()

    def answer_written(self, now: float) -> None:
        """Answer the turns whose blocks are on disk, refused by it, or late. O(blocks held)."""
        for turn_id, (keys, until_s) in list(self._held.items()):
            late = now >= until_s
            if late or not self._parts.kv.any_unwritten(keys):
                if late:
                    _log.warning("a turn is answered before its blocks are on disk: it is slow")
                del self._held[turn_id]
                self._turns.durable(turn_id, now)

    def answer_all(self, now: float) -> None:
        """The engine ends: wait no longer. The turns are in the journal."""
        for turn_id in list(self._held):
            del self._held[turn_id]
            self._turns.durable(turn_id, now)
