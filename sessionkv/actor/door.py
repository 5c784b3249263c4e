"""Who may come in: from a greeting's key to a tenant. Knows no sockets, sessions or files."""

from __future__ import annotations

from dataclasses import dataclass

from sessionkv.errors import Forbidden, Unauthorized
from sessionkv.ipc.messages import Hello
from sessionkv.types.access import Access
from sessionkv.types.portable import LOCAL_TENANT


@dataclass(frozen=True, slots=True)
class Grant:
    """What a connection may do.

    Attributes:
        tenant: Whose sessions it sees.
        operator: It may act for any tenant, and sees the whole engine's figures.
        digest: Of its key; None where no key was asked for.
    """

    tenant: str
    operator: bool
    digest: bytes | None = None


OWN = Grant(LOCAL_TENANT, operator=True)
"""Of whoever reaches an engine without keys: its user."""


class Door:
    """Lets connections in as the keys say; without keys everybody is the engine's user."""

    def __init__(self, access: Access) -> None:
        """With these keys."""
        self._access = access

    @property
    def is_open(self) -> bool:
        """Whether no key is asked for."""
        return not self._access.keys

    def admit(self, hello: Hello) -> Grant:
        """What a greeting is granted.

        Raises:
            Unauthorized: A key is asked for and this is none.
            Forbidden: Somebody who is no operator asks to act for another tenant.
        """
        if self.is_open:
            return Grant(hello.tenant or LOCAL_TENANT, operator=True)
        entry = None if hello.key is None else self._access.find(hello.key)
        if entry is None:
            raise Unauthorized("this engine asks for a key: give one that it knows in hello.key")
        if hello.tenant not in (None, entry.tenant) and not entry.operator:
            raise Forbidden("only an operator's key may act for another tenant")
        return Grant(hello.tenant or entry.tenant, entry.operator, entry.digest)

    def turns_of(self, tenant: str) -> int | None:
        """Turns that a tenant may have at a time; None where nothing is said of it."""
        quota = self._access.quotas.get(tenant)
        return None if quota is None else quota.turns

    def still_allows(self, grant: Grant) -> bool:
        """Whether a grant of before is one under the present keys too."""
        if self.is_open:
            return True
        return any(
            entry.digest == grant.digest
            and entry.operator >= grant.operator
            and (entry.operator or entry.tenant == grant.tenant)
            for entry in self._access.keys
        )
