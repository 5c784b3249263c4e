"""Who may use an engine: API keys, the tenant of each, quotas, and what all tenants may share.

Plain data. A key itself is never kept, only its SHA-256. Standard library only.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, fields

from sessionkv.types.blocks import Tier

SERVICE_TENANT = "~gateway"
"""Of whoever serves HTTP for an engine with keys, before anybody calls: it has no sessions."""


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """What one tenant may have; None for no limit.

    Attributes:
        device_bytes: KV of its sessions that is kept in device memory before that of others: what
            goes past it is the first to leave. A tenant without has no limit and no protection.
        host_bytes: The same in host memory.
        disk_bytes: The same on disk.
        turns: Turns and generations that run or wait; more are refused with ``overloaded``.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    turns: int | None = None

    def bytes_in(self, tier: Tier) -> int | None:
        """The limit of one tier."""
        if tier is Tier.DEVICE:
            return self.device_bytes
        return self.host_bytes if tier is Tier.HOST else self.disk_bytes

    @property
    def is_empty(self) -> bool:
        """Whether it limits nothing."""
        return all(getattr(self, item.name) is None for item in fields(self))


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, without the key.

    Attributes:
        name: For people.
        digest: SHA-256 of the key's UTF-8.
        tenant: Whose sessions it opens.
        operator: May act for any tenant and sees all figures.
        quota: The tenant's, as far as this key's entry says.
    """

    name: str
    digest: bytes
    tenant: str
    operator: bool = False
    quota: TenantQuota = TenantQuota()


def key_digest(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).digest()


@dataclass(frozen=True, slots=True)
class Access:
    """All keys of an engine, and the system prompts that its tenants may share.

    Attributes:
        keys: None at all leave the engine open to whoever reaches its socket.
        public: System prompts that the operator declared public.
    """

    keys: tuple[ApiKey, ...] = ()
    public: tuple[str, ...] = ()

    def find(self, key: str) -> ApiKey | None:
        """The entry of a key. Compared with all of them, whichever fits: the time says nothing."""
        digest, found = key_digest(key), None
        for entry in self.keys:
            if hmac.compare_digest(entry.digest, digest):
                found = entry
        return found

    @property
    def tenants(self) -> tuple[str, ...]:
        """Every tenant that has a key of its own, each once, in the order of the keys."""
        found = dict.fromkeys(entry.tenant for entry in self.keys)
        return tuple(tenant for tenant in found if tenant != SERVICE_TENANT)

    def with_service(self, key: str) -> Access:
        """The same and a key of the engine's own HTTP server, which may look at nothing."""
        entry = ApiKey(SERVICE_TENANT, key_digest(key), SERVICE_TENANT, quota=TenantQuota(turns=0))
        return Access((*self.keys, entry), self.public)

    @property
    def quotas(self) -> Mapping[str, TenantQuota]:
        """The quota of each tenant that has one: what its keys' entries say together."""
        found: dict[str, TenantQuota] = {}
        for entry in self.keys:
            if not entry.quota.is_empty:
                found[entry.tenant] = _joined(found.get(entry.tenant, TenantQuota()), entry.quota)
        return found


def _joined(one: TenantQuota, other: TenantQuota) -> TenantQuota:
    """Both together; where both say something, the smaller."""
    values: dict[str, int | None] = {}
    for item in fields(TenantQuota):
        said = [v for v in (getattr(one, item.name), getattr(other, item.name)) if v is not None]
        values[item.name] = min(said, default=None)
    return TenantQuota(**values)
