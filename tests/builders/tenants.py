"""Keys of invented tenants, and engines that ask for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sessionkv import Client, EngineConfig
from sessionkv.types.access import Access, ApiKey, TenantQuota, key_digest
from tests.builders.engine import SocketEngine, socket_engine

KEYS = {"alice": "key-of-alice", "bob": "key-of-bob", "root": "key-of-the-operator"}


def entry(name: str, **fields: Any) -> ApiKey:
    """The entry of one of :data:`KEYS`; ``root``'s is an operator's."""
    is_operator = name == "root"
    return ApiKey(name, key_digest(KEYS[name]), name, is_operator, TenantQuota(**fields))


def access(*, public: tuple[str, ...] = (), **quotas: dict[str, int]) -> Access:
    """All of :data:`KEYS`, with quotas by name."""
    return Access(tuple(entry(name, **quotas.get(name, {})) for name in KEYS), public)


@contextmanager
def tenants(
    folder: Path,
    config: EngineConfig | None = None,
    *,
    access: Access,
    **engine: Any,
) -> Iterator[tuple[SocketEngine, Client, Client]]:
    """An engine with keys, and a client of alice's and one of bob's."""
    with (
        socket_engine(folder, config, access=access, **engine) as served,
        served.client(KEYS["alice"]) as alice,
        served.client(KEYS["bob"]) as bob,
    ):
        yield served, alice, bob
