"""Questions to the journal and what comes back, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from sessionkv.types import KeyRecord, SessionRow, StoredSession


@dataclass(frozen=True, slots=True)
class FindSession:
    """A session with all its turns. The answer is a ``StoredSession``, or None."""

    tenant: str
    name: str


@dataclass(frozen=True, slots=True)
class ListSessions:
    """A page of a tenant's sessions by name. The answer is a :class:`SessionPage`.

    Unnamed ones only where ``prefix`` begins with ``~``.
    """

    tenant: str
    prefix: str = ""
    after: str | None = None
    limit: int = 1000


@dataclass(frozen=True, slots=True)
class FindKey:
    """What is kept under an idempotency key. The answer is a ``KeyRecord``, or None."""

    tenant: str
    key: str


@dataclass(frozen=True, slots=True)
class FindDue:
    """What has run out. The answer is a :class:`Due`.

    Attributes:
        unnamed_until_s: Unnamed heads last used by then have.
        keep_unnamed: Those past so many have too, the oldest of the tenant that has most.
        keys_until_s: Idempotency keys made by then have.
        keep_keys: Those past so many have too, likewise.
        limit: Most heads named in the answer.
    """

    unnamed_until_s: float
    keep_unnamed: int
    keys_until_s: float
    keep_keys: int
    limit: int


Question = FindSession | ListSessions | FindKey | FindDue


@dataclass(frozen=True, slots=True)
class SessionPage:
    """Sessions in order; ``after`` is where the next page begins, None at the end."""

    rows: tuple[SessionRow, ...]
    after: str | None


@dataclass(frozen=True, slots=True)
class Due:
    """Unnamed heads that have run out, and whether idempotency keys have."""

    heads: tuple[tuple[str, str], ...]
    keys: bool


Reply = StoredSession | SessionPage | KeyRecord | Due | None
