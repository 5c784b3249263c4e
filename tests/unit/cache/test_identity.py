"""The root of the chain names everything that changes KV bytes, each field apart."""

from dataclasses import fields, replace

import pytest

from sessionkv.cache.identity import KVIdentity
from sessionkv.types import KVGeometry

GEOMETRY = KVGeometry(2, 3, 64, 16, "float32", 4)
IDENTITY = KVIdentity("w1", GEOMETRY, rope="theta=10000", numerics="torch-1")


def test_the_root_is_pinned() -> None:
    assert IDENTITY.root_hash().hex() == (
        "2ff095ff053ee1b370995dbf4ee01d86e2c8bd7b22e394645c02f77e30bc4c53"
    )


@pytest.mark.parametrize(
    "other",
    [
        replace(IDENTITY, weights_fingerprint="w2"),
        replace(IDENTITY, rope="theta=500000"),
        replace(IDENTITY, numerics="torch-2"),
        replace(IDENTITY, kv_scheme="int8"),
        replace(IDENTITY, adapter="a"),
        replace(IDENTITY, format_version=2),
        *(
            replace(IDENTITY, geometry=replace(GEOMETRY, **{field.name: value}))
            for field, value in zip(fields(GEOMETRY), (9, 9, 9, 8, "bfloat16", 2), strict=True)
        ),
    ],
)
def test_every_field_counts(other: KVIdentity) -> None:
    assert other.root_hash() != IDENTITY.root_hash()


def test_neighbouring_fields_do_not_run_together() -> None:
    one = replace(IDENTITY, rope="ab", numerics="c")
    other = replace(IDENTITY, rope="a", numerics="bc")
    assert one.root_hash() != other.root_hash()
