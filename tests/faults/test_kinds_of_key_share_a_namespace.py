"""Adapter and tenant, and fields that would read alike when joined, have keys of their own."""

from dataclasses import replace

from sessionkv.cache.chain import TokenChain, public_hashes
from sessionkv.cache.identity import KVIdentity
from sessionkv.types import KVGeometry
from tests.builders.kv_world import B, T, World

IDENTITY = KVIdentity("w", KVGeometry(1, 1, 8, B, "float32", 4), rope="plain", numerics="1")


def first_key(*, adapter: str = "", tenant: str = "", public_tokens: int = 0) -> bytes:
    root = replace(IDENTITY, adapter=adapter).root_hash()
    public = frozenset(public_hashes(root, B, T(8)[:public_tokens]))
    chain = TokenChain(root, B, tenant=tenant, public=public, token_ids=T(8))
    return chain.hashes[0]


def test_the_same_text_under_different_kinds_of_key_never_meets() -> None:
    variants = [
        {"tenant": "q7"},
        {"adapter": "q7"},
        {"adapter": "q", "tenant": "7"},
        {"adapter": "q7", "public_tokens": 8},
        {"public_tokens": 8},
        {},
    ]
    keys = [first_key(**variant) for variant in variants]
    assert len(set(keys)) == len(variants)
    assert keys == [first_key(**variant) for variant in variants]


def test_tenants_whose_names_join_alike_do_not_hit_each_other() -> None:
    world = World(device_blocks=32)
    for tenant in ("q", "q7", "7", ""):
        assert world.kv.match(world.chain(T(8), tenant)).num_tokens == 0
        world.turn(T(8), tenant=tenant)
        assert world.kv.match(world.chain(T(8), tenant)).num_tokens == 7
