"""Token-fair shares between tenants, and between the sessions of a tenant.

Virtual token counters: each share counts what it was served, whoever was served least goes first,
and one that comes back after a pause is lifted to the least of those present, so that idling saves
up no claim (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2).
Knows nothing of sequences or blocks.
"""

from __future__ import annotations

OUTPUT_WEIGHT = 2
"""Served tokens that one output token counts for; input counts 1 (the paper's weights)."""

_MAX_REMEMBERED = 4096


class Share:
    """A node of the tree of shares: the root, a tenant, or a session of it.

    Attributes:
        served: Weighted tokens served; comparable between children of one node only.
    """

    __slots__ = ("_active", "_children", "_key", "_last_left", "parent", "served")

    def __init__(self, parent: Share | None = None, key: str = "") -> None:
        self.parent = parent
        self.served = 0
        self._key = key
        self._active = 0
        self._last_left = 0
        self._children: dict[str, Share] = {}

    def join(self, key: str) -> Share:
        """The child of that key, counted as present until :meth:`leave`. O(children) at most."""
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = Share(self, key)
        if child._active == 0:
            present = [c.served for c in self._children.values() if c._active]
            child.served = max(child.served, min(present, default=self._last_left))
        child._active += 1
        return child

    def leave(self) -> None:
        """Undo one :meth:`join`; the count is remembered, in bounded number."""
        siblings = self.parent
        self._active -= 1
        if siblings is None or self._active:
            return
        siblings._last_left = self.served
        # Moved to the end, so that the one gone longest is forgotten first.
        siblings._children[self._key] = siblings._children.pop(self._key)
        if len(siblings._children) > _MAX_REMEMBERED:
            oldest = next((c for c in siblings._children.values() if not c._active), None)
            if oldest is not None:
                del siblings._children[oldest._key]

    def charge(self, served: int) -> None:
        """Count tokens for this share and the one above it."""
        self.served += served
        if self.parent is not None:
            self.parent.served += served


class FairShares:
    """Shares by (tenant, session)."""

    def __init__(self) -> None:
        self._root = Share()

    def join(self, group: tuple[str, str]) -> Share:
        """The session's share, present until :meth:`leave` is called with it as often."""
        tenant, session = group
        return self._root.join(tenant).join(session)

    def leave(self, share: Share) -> None:
        """One sequence of the share is gone."""
        tenant = share.parent
        share.leave()
        if tenant is not None:
            tenant.leave()
