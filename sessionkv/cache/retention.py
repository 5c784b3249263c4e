"""Retention: which block keys the sessions still want, and which are pinned in which tier.

A key is *retained* while a live node owns it and *pinned* in a tier while a pinned head reaches an
owner; of several pins there the highest priority counts. A pin speaks of its own tier alone: pinned
on the device says nothing about the host, so that each promise is checked against the cap of the
tier it is made for. In memory a key is *expected* between the two while a session that is likely
to be back soon holds it. Retention orders eviction and never forbids it (leases do). Owners and
pins are kept up to date by the tree of turns, expectations by :mod:`sessionkv.cache.expected`;
everybody else asks. What is past its tenant's quota (:mod:`sessionkv.cache.quotas`) ranks as if
nobody wanted it. Knows nothing of nodes, blocks' places or time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from sessionkv.cache.quotas import Part, TenantQuotas
from sessionkv.cache.retention_view import EXPECTED, PINNED, RETAINED, UNRETAINED
from sessionkv.errors import PinRefused
from sessionkv.types import BlockHash, Tier
from sessionkv.types.access import TenantQuota

PIN_SHARE = 0.8
"""Part of a tier's cap that live pins may promise."""
MAX_LAPSED = 65_536
_DEVICE, _HOST = Tier.DEVICE, Tier.HOST

Pin = tuple[Tier, int]
"""Tier and priority."""
_Priorities = tuple[int, ...]
"""Of all pinned nodes that own a key, ascending; mostly one, and then shared between keys."""


class Retention:
    """Owner and pin counts of block keys. One thread.

    Attributes:
        block_bytes: Bytes of one block's extent.
        quotas: Of tenants; told here of owners, asked by everybody else.
    """

    def __init__(self, *, block_bytes: int, caps: Mapping[Tier, int]) -> None:
        """Start empty.

        Args:
            block_bytes: Bytes of one block's extent.
            caps: Bytes each tier may hold; a tier that is missing holds 0.
        """
        self.block_bytes = block_bytes
        self._allowed = {tier: int(caps.get(tier, 0) * PIN_SHARE) for tier in Tier}
        self._owners: dict[BlockHash, int] = {}
        self._pins: dict[Tier, dict[BlockHash, _Priorities]] = {tier: {} for tier in Tier}
        self._on_device, self._on_host, self._on_disk = (self._pins[tier] for tier in Tier)
        self._expected: dict[BlockHash, int] = {}
        self.quotas = TenantQuotas(block_bytes=block_bytes, owned=self._owners)
        self._past_device, self._past_host, self._past_disk = (
            self.quotas.past[tier] for tier in Tier
        )
        self._fallen: dict[BlockHash, None] = {}
        self._lapsed: dict[BlockHash, None] = {}

    def rank(self, key: BlockHash, tier: Tier) -> int:
        """Class of ``key`` for eviction from ``tier``; a lower one leaves first. O(1).

        Returns:
            0 unretained or past its tenant's quota, 1 retained, 2 expected, 3 and its priority
            where it is pinned in ``tier``.
        """
        # Asked for each block at the cold end: an enum as a dict key would cost more than this.
        if tier is _DEVICE:
            pins, past = self._on_device, self._past_device
        elif tier is _HOST:
            pins, past = self._on_host, self._past_host
        else:
            pins, past = self._on_disk, self._past_disk
        if past and key in past:
            return UNRETAINED
        priorities = pins.get(key)
        if priorities is not None:
            return PINNED + priorities[-1]
        if key in self._expected and pins is not self._on_disk:
            return EXPECTED
        return RETAINED if key in self._owners else UNRETAINED

    def rank_on_disk(self, key: bytes) -> int:
        """As :meth:`rank` for the disk, 0 also for what is not known here. Any thread may ask."""
        return self.rank(BlockHash(key), Tier.DISK)

    def take_fallen(self) -> tuple[BlockHash, ...]:
        """Keys whose rank may have fallen in any tier since the last call, each once."""
        if not self._fallen:
            return ()
        fallen = tuple(self._fallen)
        self._fallen.clear()
        return fallen

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
        return len(self._pins[tier]) * self.block_bytes

    def check_pin(self, tier: Tier, keys: Iterable[BlockHash]) -> None:
        """See whether ``keys`` may be pinned in ``tier`` beside what is pinned there. O(keys).

        Raises:
            PinRefused: With the bytes needed and allowed; where there are several tenants, with
                the bytes of ``keys`` alone.
        """
        pinned, wanted = self._pins[tier], set(keys)
        needed = (len(pinned) + sum(key not in pinned for key in wanted)) * self.block_bytes
        allowed = self._allowed[tier]
        if needed <= allowed:
            return
        if self.quotas.has_tenants:
            asked = len(wanted) * self.block_bytes
            raise PinRefused(
                f"the {tier.value} tier has no room for a pin of {asked} bytes now",
                tier=tier.value,
                needed_bytes=asked,
            )
        raise PinRefused(
            f"all pins in the {tier.value} tier would need {needed} bytes; "
            f"{allowed} are allowed ({PIN_SHARE:.0%} of its cap)",
            tier=tier.value,
            needed_bytes=needed,
            allowed_bytes=allowed,
        )

    def check_quota(self, tenant: str, tier: Tier, keys: Iterable[BlockHash]) -> None:
        """See whether the tenant's quota has room for ``keys`` and its other pins there. O(keys).

        Raises:
            PinRefused: With the bytes needed and allowed.
        """
        allowed = self.quotas.limits(tenant).bytes_in(tier)
        if allowed is None:
            return
        needed = self.quotas.pinned_bytes(tenant, tier, keys)
        if needed > allowed:
            raise PinRefused(
                f"all your pins in the {tier.value} tier would need {needed} bytes; your quota is "
                f"{allowed}",
                tier=tier.value,
                needed_bytes=needed,
                allowed_bytes=allowed,
            )

    def own(
        self,
        keys: Sequence[BlockHash],
        pins: Iterable[Pin] = (),
        *,
        tenant: str = "",
        part: int = 0,
    ) -> None:
        """A node of the tenant takes ``keys``; ``pins`` are those that reach the node.

        ``part`` is a number that only these keys of this node have.
        """
        _count_up(self._owners, keys)
        for pin in pins:
            self.pin(pin, keys, tenant=tenant)
        self._fallen.update(dict.fromkeys(self.quotas.use(tenant, ((part, keys),))))

    def disown(
        self,
        keys: Sequence[BlockHash],
        pins: Iterable[Pin] = (),
        *,
        tenant: str = "",
        part: int = 0,
    ) -> list[BlockHash]:
        """A node of the tenant lets go of ``keys``; returns those that nobody owns now."""
        for pin in pins:
            self.unpin(pin, keys, tenant=tenant)
        gone = _count_down(self._owners, keys)
        self._fallen.update(dict.fromkeys(gone))
        self._fallen.update(dict.fromkeys(self.quotas.leave(tenant, part, gone)))
        return gone

    def forget(self, keys: Collection[BlockHash], *, tenant: str = "") -> None:
        """A node that owns ``keys`` leaves memory; for that they are wanted no less."""
        self.quotas.forget(tenant, _count_down(self._owners, keys))

    def used(self, parts: Iterable[Part], *, tenant: str) -> None:
        """A session of the tenant has used these parts of its log, the one to stay longest last.

        O(parts, and keys that come within the quota); free for a tenant without.
        """
        if not self.quotas.limits(tenant).is_empty:
            self._fallen.update(dict.fromkeys(self.quotas.use(tenant, parts)))

    def set_limits(self, limits: Mapping[str, TenantQuota], *, has_tenants: bool) -> None:
        """Other quotas from now on. O(blocks)."""
        self.quotas.has_tenants = has_tenants
        self._fallen.update(dict.fromkeys(self.quotas.set_limits(limits)))

    def pin(self, pin: Pin, keys: Collection[BlockHash], *, tenant: str = "") -> None:
        """A first pin of this tier and priority reaches a node of the tenant that owns ``keys``."""
        tier, priority = pin
        pinned, alone = self._pins[tier], (priority,)
        new: list[BlockHash] = []
        for key in keys:
            before = pinned.get(key)
            if before is None:
                new.append(key)
            pinned[key] = alone if before is None else tuple(sorted((*before, priority)))
            self._lapsed.pop(key, None)
        self._fallen.update(dict.fromkeys(self.quotas.pin(tenant, tier, new)))

    def unpin(self, pin: Pin, keys: Collection[BlockHash], *, tenant: str = "") -> None:
        """The last pin of this tier and priority left a node of the tenant that owns ``keys``."""
        tier, priority = pin
        pinned = self._pins[tier]
        self._fallen.update(dict.fromkeys(keys))
        gone: list[BlockHash] = []
        for key in keys:
            at = pinned[key].index(priority)
            left = pinned[key][:at] + pinned[key][at + 1 :]
            if left:
                pinned[key] = left
            else:
                del pinned[key]
                gone.append(key)
        self._fallen.update(dict.fromkeys(self.quotas.unpin(tenant, tier, gone)))

    def expect(self, keys: Iterable[BlockHash]) -> None:
        """A session that is likely to be back soon holds ``keys``."""
        _count_up(self._expected, keys)

    def unexpect(self, keys: Iterable[BlockHash]) -> None:
        """It holds them no longer."""
        self._fallen.update(dict.fromkeys(_count_down(self._expected, keys)))

    def note_lapsed(self, keys: Iterable[BlockHash]) -> None:
        """Remember that a pin on ``keys`` ran out; of those still pinned nothing is remembered."""
        for key in keys:
            if not any(key in pins for pins in self._pins.values()):
                self._lapsed.pop(key, None)
                self._lapsed[key] = None
        while len(self._lapsed) > MAX_LAPSED:
            del self._lapsed[next(iter(self._lapsed))]


def _count_up(counts: dict[BlockHash, int], keys: Iterable[BlockHash]) -> None:
    for key in keys:
        counts[key] = counts.get(key, 0) + 1


def _count_down(counts: dict[BlockHash, int], keys: Iterable[BlockHash]) -> list[BlockHash]:
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
