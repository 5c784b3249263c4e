"""Retention: which block keys the sessions still want, and which are pinned in which tier.

A key is *retained* while a live node owns it and *pinned* in a tier while a pinned head reaches an
owner. A pin speaks of its own tier alone: pinned on the device says nothing about the host, so that
each promise is checked against the cap of the tier it is made for. Retention orders eviction and
never forbids it (leases do). Kept up to date by the tree of turns, which alone may change it;
everybody else asks. Knows nothing of nodes, names, blocks' places or time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from sessionkv.errors import PinRefused
from sessionkv.types import BlockHash, Tier

UNRETAINED, RETAINED, PINNED = 0, 1, 2
PIN_SHARE = 0.8
"""Part of a tier's cap that live pins may promise."""
MAX_LAPSED = 65_536
_DEVICE, _HOST = Tier.DEVICE, Tier.HOST


class Retention:
    """Owner and pin counts of block keys. One thread."""

    def __init__(self, *, block_bytes: int, caps: Mapping[Tier, int]) -> None:
        """Start empty.

        Args:
            block_bytes: Bytes of one block's extent.
            caps: Bytes each tier may hold; a tier that is missing holds 0.
        """
        self._block_bytes = block_bytes
        self._allowed = {tier: int(caps.get(tier, 0) * PIN_SHARE) for tier in Tier}
        self._owners: dict[BlockHash, int] = {}
        self._pins: dict[Tier, dict[BlockHash, int]] = {tier: {} for tier in Tier}
        self._on_device, self._on_host, self._on_disk = (self._pins[tier] for tier in Tier)
        self._lapsed: dict[BlockHash, None] = {}

    def rank(self, key: BlockHash, tier: Tier) -> int:
        """Class of ``key`` for eviction from ``tier``; a lower one leaves first. O(1).

        Returns:
            0 unretained, 1 retained, 2 pinned in ``tier``.
        """
        # Asked for each block at the cold end: an enum as a dict key would cost more than this.
        if tier is _DEVICE:
            pins = self._on_device
        else:
            pins = self._on_host if tier is _HOST else self._on_disk
        if key in pins:
            return PINNED
        return RETAINED if key in self._owners else UNRETAINED

    def owners(self, key: BlockHash) -> int:
        """How many live nodes own ``key``."""
        return self._owners.get(key, 0)

    def pin_lapsed(self, key: BlockHash) -> bool:
        """Whether a pin on ``key`` ran out and it has not been pinned since (bounded memory)."""
        return key in self._lapsed

    @property
    def num_keys(self) -> int:
        """Retained keys, each once."""
        return len(self._owners)

    def pinned_bytes(self, tier: Tier) -> int:
        """Bytes of everything pinned in ``tier``, each block once."""
        return len(self._pins[tier]) * self._block_bytes

    def check_pin(self, tier: Tier, keys: Iterable[BlockHash]) -> None:
        """See whether ``keys`` may be pinned in ``tier`` beside what is pinned there. O(keys).

        Raises:
            PinRefused: With the bytes needed and allowed.
        """
        pinned = self._pins[tier]
        needed = (len(pinned) + sum(key not in pinned for key in set(keys))) * self._block_bytes
        allowed = self._allowed[tier]
        if needed > allowed:
            raise PinRefused(
                f"all pins in the {tier.value} tier would need {needed} bytes; "
                f"{allowed} are allowed ({PIN_SHARE:.0%} of its cap)",
                tier=tier.value,
                needed_bytes=needed,
                allowed_bytes=allowed,
            )

    def own(self, keys: Collection[BlockHash], tiers: Iterable[Tier] = ()) -> None:
        """A node takes ``keys``; ``tiers`` are those that pins on the node speak of."""
        _count_up(self._owners, keys)
        for tier in tiers:
            self.pin(tier, keys)

    def disown(self, keys: Collection[BlockHash], tiers: Iterable[Tier] = ()) -> list[BlockHash]:
        """A node lets go of ``keys``; returns those that nobody owns now."""
        for tier in tiers:
            self.unpin(tier, keys)
        return _count_down(self._owners, keys)

    def pin(self, tier: Tier, keys: Collection[BlockHash]) -> None:
        """A first pin in ``tier`` reaches a node that owns ``keys``."""
        _count_up(self._pins[tier], keys)
        for key in keys:
            self._lapsed.pop(key, None)

    def unpin(self, tier: Tier, keys: Collection[BlockHash]) -> None:
        """The last pin in ``tier`` left a node that owns ``keys``."""
        _count_down(self._pins[tier], keys)

    def note_lapsed(self, keys: Iterable[BlockHash]) -> None:
        """Remember that a pin on ``keys`` ran out; of those still pinned nothing is remembered."""
        for key in keys:
            if not any(key in pins for pins in self._pins.values()):
                self._lapsed.pop(key, None)
                self._lapsed[key] = None
        while len(self._lapsed) > MAX_LAPSED:
            del self._lapsed[next(iter(self._lapsed))]


def _count_up(counts: dict[BlockHash, int], keys: Collection[BlockHash]) -> None:
    for key in keys:
        counts[key] = counts.get(key, 0) + 1


def _count_down(counts: dict[BlockHash, int], keys: Collection[BlockHash]) -> list[BlockHash]:
    """Take one off each key; returns those that reached 0. An unknown key raises KeyError."""
    gone = []
    for key in keys:
        left = counts[key] - 1
        if left:
            counts[key] = left
        else:
            del counts[key]
            gone.append(key)
    return gone
