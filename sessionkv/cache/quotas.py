"""Which of a tenant's retained blocks are within its quota: those of its sessions used last.

::

    used longest ago                                        used last
    | past it: ranked as if no session wanted them | within the quota |

A tenant that floods the cache pushes out its own older blocks and nobody else's: what goes past its
quota in a tier is the first to leave that tier. Blocks of a declared public prefix belong to no
tenant and count for none. Nothing is refused or deleted here, and what running turns hold does not
count.

Told of owners by :class:`~sessionkv.cache.retention.Retention`. Knows keys and tenants' names, no
places, nodes or time. O(1) a key and tier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field

from sessionkv.types import BlockHash, Tier
from sessionkv.types.access import TenantQuota

_NO_QUOTA = TenantQuota()


@dataclass(slots=True)
class _Window:
    """One tenant in one tier.

    Attributes:
        limit_blocks: The quota; ``pinned`` and ``within`` together are no more, if that can be.
        pinned: What the tenant has pinned there; no part of the others.
        within: The rest in the order of use, the oldest first.
        past: What has no place.
    """

    limit_blocks: int
    pinned: set[BlockHash]
    within: OrderedDict[BlockHash, None] = field(default_factory=OrderedDict)
    past: set[BlockHash] = field(default_factory=set)


class TenantQuotas:
    """Quotas of all tenants. One thread; others may look whether a key is in :attr:`past`.

    Attributes:
        past: For each tier the retained keys that are past their tenant's quota.
        public: Keys of declared public prefixes. They only become more while an engine runs.
        has_tenants: There may be others than one, who are not to learn of each other.
    """

    def __init__(self, *, block_bytes: int, owned: Container[BlockHash]) -> None:
        """No tenant has a quota.

        Args:
            block_bytes: Bytes of one block's extent.
            owned: Keys that sessions in memory want; looked at, not changed.
        """
        self.past: dict[Tier, set[BlockHash]] = {tier: set() for tier in Tier}
        self.public: set[BlockHash] = set()
        self.has_tenants = False
        self._block_bytes = block_bytes
        self._owned = owned
        self._pinned: dict[tuple[str, Tier], set[BlockHash]] = {}
        self._limits: Mapping[str, TenantQuota] = {}
        self._windows: dict[str, dict[Tier, _Window]] = {}

    def limits(self, tenant: str) -> TenantQuota:
        """The tenant's quota; an empty one where it has none."""
        return self._limits.get(tenant, _NO_QUOTA)

    def set_limits(self, limits: Mapping[str, TenantQuota]) -> list[BlockHash]:
        """Other quotas from now on. O(blocks).

        Returns:
            Keys that are past a quota since.
        """
        self._limits = dict(limits)
        fallen: list[BlockHash] = []
        for tenant in self._windows.keys() | limits.keys():
            windows = self._windows.setdefault(tenant, {})
            for tier in Tier:
                size = self.limits(tenant).bytes_in(tier)
                if size is None:
                    window = windows.pop(tier, None)
                    self.past[tier] -= window.past if window else set()
                    continue
                blocks = size // self._block_bytes
                pinned = self._pinned_in(tenant, tier)
                windows.setdefault(tier, _Window(blocks, pinned)).limit_blocks = blocks
                fallen += self._cut(tier, windows[tier])
        return fallen

    def use(self, tenant: str, keys: Iterable[BlockHash]) -> list[BlockHash]:
        """Sessions of the tenant want ``keys`` and have used them now, the last one last.

        Returns:
            Keys that had to make room.
        """
        windows = self._windows.get(tenant)
        if not windows:
            return []
        own = [key for key in keys if key not in self.public]
        fallen: list[BlockHash] = []
        for tier, window in windows.items():  # a tight loop: a history may be long
            if window.past:
                again = window.past.intersection(own)
                window.past -= again
                self.past[tier] -= again
            within, move = window.within, window.within.move_to_end
            for key in own if not window.pinned else [k for k in own if k not in window.pinned]:
                if key in within:
                    move(key)
                else:
                    within[key] = None
            fallen += self._cut(tier, window)
        return fallen

    def pinned_bytes(self, tenant: str, tier: Tier, keys: Iterable[BlockHash] = ()) -> int:
        """Of all that the tenant would have pinned in a tier together with ``keys``. O(keys)."""
        pinned = self._pinned_in(tenant, tier)
        more = {key for key in keys if key not in pinned and key not in self.public}
        return (len(pinned) + len(more)) * self._block_bytes

    def pin(self, tenant: str, tier: Tier, keys: Iterable[BlockHash]) -> list[BlockHash]:
        """The tenant has pinned ``keys``: they stay. Returns keys that had to make room."""
        if not self.has_tenants:
            return []
        new = [key for key in keys if key not in self.public]
        self._pinned_in(tenant, tier).update(new)
        window = self._windows.get(tenant, {}).get(tier)
        if window is None:
            return []
        for key in new:
            window.within.pop(key, None)
            self._not_past(tier, window, key)
        return self._cut(tier, window)

    def unpin(self, tenant: str, tier: Tier, keys: Collection[BlockHash]) -> list[BlockHash]:
        """It has them pinned no longer: they count as used longest ago. Returns what has to go."""
        if not self.has_tenants:
            return []
        pinned = self._pinned_in(tenant, tier)
        window = self._windows.get(tenant, {}).get(tier)
        freed = [key for key in keys if key in pinned]
        pinned.difference_update(freed)
        if window is None:
            return []
        for key in freed:
            window.within[key] = None
            window.within.move_to_end(key, last=False)
        return self._cut(tier, window)

    def leave(self, tenant: str, keys: Iterable[BlockHash]) -> None:
        """Nobody wants ``keys`` any more."""
        windows = self._windows.get(tenant, {})
        for key in keys if windows else ():
            for tier, window in windows.items():
                window.within.pop(key, None)
                self._not_past(tier, window, key)

    def forget(self, tenant: str, keys: Iterable[BlockHash]) -> None:
        """Their sessions leave memory: those within the quota go on to count."""
        windows = self._windows.get(tenant, {})
        for key in keys if windows else ():
            for tier, window in windows.items():
                self._not_past(tier, window, key)

    def figures(self, tenant: str) -> dict[str, dict[str, int]]:
        """Of each tier that has a quota: the quota, and the bytes within and past it."""
        return {
            tier.value: {
                "quota_bytes": window.limit_blocks * self._block_bytes,
                "retained_bytes": (len(window.pinned) + len(window.within)) * self._block_bytes,
                "past_bytes": len(window.past) * self._block_bytes,
            }
            for tier, window in self._windows.get(tenant, {}).items()
        }

    def _pinned_in(self, tenant: str, tier: Tier) -> set[BlockHash]:
        return self._pinned.setdefault((tenant, tier), set())

    def _cut(self, tier: Tier, window: _Window) -> list[BlockHash]:
        """Let those used longest ago go until the rest fits beside what is pinned."""
        within, fallen = window.within, []
        room = max(window.limit_blocks - len(window.pinned), 0)
        while len(within) > room:
            key, _ = within.popitem(last=False)
            fallen.append(key)
            if key in self._owned:
                window.past.add(key)
                self.past[tier].add(key)
        return fallen

    def _not_past(self, tier: Tier, window: _Window, key: BlockHash) -> None:
        if key in window.past:
            window.past.remove(key)
            self.past[tier].remove(key)
