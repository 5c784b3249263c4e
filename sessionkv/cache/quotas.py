"""Which of a tenant's retained blocks are within its quota: those of its sessions used last.

::

    used longest ago                                        used last
    | past it: ranked as if no session wanted them | within the quota |

A tenant that floods the cache pushes out its own older blocks and nobody else's: what goes past its
quota in a tier is the first to leave that tier. Blocks of a declared public prefix belong to no
tenant and count for none. Nothing is refused or deleted here, and what running turns hold does not
count.

Blocks come, are used and go by *parts*, as the turns of a session own them: to use a long session
again is one step for each of its parts, and only blocks that come within or go past cost a step
each. Of the part used longest ago the end goes first.

Told of owners by :class:`~sessionkv.cache.retention.Retention`. Knows keys and tenants' names, no
places, nodes or time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sessionkv.types import BlockHash, Tier
from sessionkv.types.access import TenantQuota

_NO_QUOTA = TenantQuota()

Part = tuple[int, Sequence[BlockHash]]
"""Keys that are owned together, in the log's order, and a number that only they have."""


@dataclass(slots=True)
class _Part:
    """Of a part in a window: its keys, and how many from the first on are within."""

    keys: Sequence[BlockHash]
    num_within: int = 0


@dataclass(slots=True)
class _Window:
    """One tenant in one tier.

    Attributes:
        limit_blocks: The quota; ``pinned`` and ``num_within`` together are no more, if that can be.
        pinned: What the tenant has pinned there.
        parts: Those of which anything is within, in the order of use, the oldest first.
        within: For each key that is within, in how many parts.
        num_within: How many of these are not pinned.
        past: What is owned, not pinned, and has no place.
    """

    limit_blocks: int
    pinned: set[BlockHash]
    parts: OrderedDict[int, _Part] = field(default_factory=OrderedDict)
    within: dict[BlockHash, int] = field(default_factory=dict)
    num_within: int = 0
    past: set[BlockHash] = field(default_factory=set)


def _that_fit(window: _Window, parts: Sequence[Part]) -> list[int]:
    """Of each part how many keys will not be cut off at once: the last part counts first. O(parts).

    Without this a log that is longer than the quota would come within and go past each time.
    """
    room = max(window.limit_blocks - len(window.pinned), 0)
    found: list[int] = []
    for _, keys in reversed(parts):
        num_pinned = 0
        if keys and keys[0] in window.pinned:  # else none is
            is_whole = keys[-1] in window.pinned
            num_pinned = len(keys) if is_whole else sum(key in window.pinned for key in keys)
        fit = min(len(keys) - num_pinned, room)
        room -= fit
        found.append(num_pinned + fit)
    return found[::-1]


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

    def use(self, tenant: str, parts: Iterable[Part]) -> list[BlockHash]:
        """A session of the tenant wants ``parts`` and has used them now, the last one last.

        No key is in two of them. O(parts, and keys that come within or go past).

        Returns:
            Keys that had to make room.
        """
        windows = self._windows.get(tenant)
        fallen: list[BlockHash] = []
        if not windows:
            return fallen
        used = [(number, self._not_public(keys)) for number, keys in parts]
        for tier, window in windows.items():
            for (number, keys), most in zip(used, _that_fit(window, used), strict=True):
                fallen += self._use_part(tier, window, number, keys, most=most)
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
        pinned = self._pinned_in(tenant, tier)
        new = [key for key in keys if key not in self.public and key not in pinned]
        pinned.update(new)
        window = self._windows.get(tenant, {}).get(tier)
        if window is None:
            return []
        for key in new:
            window.num_within -= key in window.within
            self._not_past(tier, window, key)
        return self._cut(tier, window)

    def unpin(self, tenant: str, tier: Tier, keys: Collection[BlockHash]) -> list[BlockHash]:
        """It has them pinned no longer: they count as when used. Returns what has to go."""
        if not self.has_tenants:
            return []
        pinned = self._pinned_in(tenant, tier)
        window = self._windows.get(tenant, {}).get(tier)
        freed = [key for key in keys if key in pinned]
        pinned.difference_update(freed)
        if window is None:
            return []
        fallen = [key for key in freed if key not in window.within]
        for key in fallen:
            self._now_past(tier, window, key)
        window.num_within += len(freed) - len(fallen)
        return fallen + self._cut(tier, window)

    def leave(self, tenant: str, number: int, gone: Iterable[BlockHash]) -> list[BlockHash]:
        """Nobody wants a part any more, nor the keys ``gone``. Returns what has lost its place."""
        fallen: list[BlockHash] = []
        gone = list(gone)
        for tier, window in self._windows.get(tenant, {}).items():
            part = window.parts.pop(number, None)
            for key in part.keys[: part.num_within] if part else ():
                fallen += self._go_past(tier, window, key)
            for key in gone:
                self._not_past(tier, window, key)
        return fallen

    def forget(self, tenant: str, gone: Iterable[BlockHash]) -> None:
        """Their sessions leave memory: those within the quota go on to count."""
        windows = self._windows.get(tenant, {})
        for key in gone if windows else ():
            for tier, window in windows.items():
                self._not_past(tier, window, key)

    def figures(self, tenant: str) -> dict[str, dict[str, int]]:
        """Of each tier that has a quota: the quota, and the bytes within and past it."""
        return {
            tier.value: {
                "quota_bytes": window.limit_blocks * self._block_bytes,
                "retained_bytes": (len(window.pinned) + window.num_within) * self._block_bytes,
                "past_bytes": len(window.past) * self._block_bytes,
            }
            for tier, window in self._windows.get(tenant, {}).items()
        }

    def _pinned_in(self, tenant: str, tier: Tier) -> set[BlockHash]:
        return self._pinned.setdefault((tenant, tier), set())

    def _cut(self, tier: Tier, window: _Window) -> list[BlockHash]:
        """Let those used longest ago go until the rest fits beside what is pinned.

        O(keys that go, and parts that are pinned): pins reach from a log's start, so a part whose
        last key is pinned is pinned as a whole.
        """
        fallen: list[BlockHash] = []
        emptied: list[int] = []
        room = max(window.limit_blocks - len(window.pinned), 0)
        if window.num_within <= room:
            return fallen
        for number, part in window.parts.items():
            while part.num_within and part.keys[part.num_within - 1] not in window.pinned:
                if window.num_within <= room:
                    break
                part.num_within -= 1
                fallen += self._go_past(tier, window, part.keys[part.num_within])
            if not part.num_within:
                emptied.append(number)
            if window.num_within <= room:
                break
        for number in emptied:
            del window.parts[number]
        return fallen

    def _not_public(self, keys: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """What is public is a log's beginning, so of a part the first keys. O(log keys)."""
        if not keys or keys[0] not in self.public:
            return keys
        return keys[bisect_left(range(len(keys)), True, key=lambda i: keys[i] not in self.public) :]

    def _use_part(
        self, tier: Tier, window: _Window, number: int, keys: Sequence[BlockHash], *, most: int
    ) -> list[BlockHash]:
        """``most`` keys of it come within, or stay; the rest is past. Returns what is past now."""
        part = window.parts.get(number)
        if part is not None:
            window.parts.move_to_end(number)
        elif most:
            part = window.parts[number] = _Part(keys)
        num_within = 0 if part is None else part.num_within
        if part is not None and most > num_within:
            for key in keys[num_within:most]:
                self._come_within(tier, window, key)
            part.num_within = most
        fallen: list[BlockHash] = []
        for i in range(len(keys) - 1, max(most, num_within) - 1, -1):
            key = keys[i]
            if key in window.past:  # the end went first: so is all before it
                break
            if key not in window.within and key not in window.pinned:
                self._now_past(tier, window, key)
                fallen.append(key)
        return fallen

    def _come_within(self, tier: Tier, window: _Window, key: BlockHash) -> None:
        number = window.within.get(key, 0)
        window.within[key] = number + 1
        if not number:
            window.num_within += key not in window.pinned
            self._not_past(tier, window, key)

    def _go_past(self, tier: Tier, window: _Window, key: BlockHash) -> list[BlockHash]:
        """One part less has the key within; the key, where that was the last one."""
        left = window.within[key] - 1
        if left:
            window.within[key] = left
            return []
        del window.within[key]
        if key in window.pinned:
            return []
        window.num_within -= 1
        self._now_past(tier, window, key)
        return [key]

    def _now_past(self, tier: Tier, window: _Window, key: BlockHash) -> None:
        if key in self._owned:
            window.past.add(key)
            self.past[tier].add(key)

    def _not_past(self, tier: Tier, window: _Window, key: BlockHash) -> None:
        if key in window.past:
            window.past.remove(key)
            self.past[tier].remove(key)
