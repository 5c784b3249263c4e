"""Token chains: every block hashed once, equal however they were built, tenants apart."""

import pytest

from sessionkv.cache import chain as chain_module
from sessionkv.cache.chain import (
    TokenChain,
    full_key,
    partial_key,
    public_hashes,
    tenant_parent,
)
from sessionkv.types import BlockHash
from tests.builders.kv_world import ROOT, B, T


def chain(token_ids=(), *, tenant="local", public_tokens=0, hashes=()) -> TokenChain:
    public = frozenset(public_hashes(ROOT, B, T(24)[:public_tokens]))
    return TokenChain(ROOT, B, tenant=tenant, public=public, token_ids=token_ids, hashes=hashes)


def test_keys_are_pinned() -> None:
    built = chain(T(10))
    assert [key.hex() for key in built.hashes] == [
        "6edcb1259f0e2f849d2ccf0d78d1b35a464715e22effa966acafd79e53918f94",
        "706d855d531b90eea53f635838aba9ebc9742bed5db20103d1667e5e010062d1",
    ]
    tail = built.tail_record(10)
    assert tail is not None
    assert tail.key.hex() == "8c678d38b913c6b8ae5c584bccd79958726c6570748760b5fb38126c47d9a0e1"
    assert tail.parent == built.hashes[1]
    assert tail.token_ids == tuple(T(10)[8:])


def test_a_tenant_with_an_accent_is_pinned() -> None:
    assert chain(T(4), tenant="é").hashes[0].hex() == (
        "ecb335b527f9624aaa4cb09f326a9b5c133c33c8f353f6f8aab1c019ccb7ee88"
    )


@pytest.mark.parametrize("length", range(14))
def test_growing_token_by_token_equals_building_at_once(length: int) -> None:
    grown = chain()
    for token in T(length):
        grown.append(token)
    extended = chain(T(length)[:3])
    extended.extend(T(length)[3:])
    assert grown.hashes == extended.hashes == chain(T(length)).hashes
    assert len(grown) == length
    assert grown.token_ids == T(length)


def test_known_hashes_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    known = chain(T(12)).hashes
    hashed: list[tuple[int, ...]] = []

    def counting(parent: BlockHash, token_ids) -> BlockHash:
        hashed.append(tuple(token_ids))
        return full_key(parent, token_ids)

    monkeypatch.setattr(chain_module, "full_key", counting)
    built = chain(T(18), hashes=known[:3])
    built.extend(T(6, 18))
    assert hashed == [tuple(T(24)[12:16]), tuple(T(24)[16:20]), tuple(T(24)[20:24])]
    assert built.hashes[:3] == known


def test_more_hashes_than_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="3 hashes of 4 tokens for 11 tokens"):
        chain(T(11), hashes=chain(T(12)).hashes)


@pytest.mark.parametrize("public_tokens", [0, 8])
@pytest.mark.parametrize("cut", range(15))
def test_truncating_equals_never_having_grown(cut: int, public_tokens: int) -> None:
    cut_chain = chain(T(14), public_tokens=public_tokens)
    cut_chain.block_tokens(3)
    cut_chain.truncate(cut)
    cut_chain.extend([1] * 6)
    fresh = chain(T(14)[:cut] + [1] * 6, public_tokens=public_tokens)
    assert cut_chain.hashes == fresh.hashes
    blocks = len(fresh.hashes)
    assert cut_chain.block_tokens(blocks) == fresh.block_tokens(blocks)
    assert cut_chain.tail_record(len(fresh)) == fresh.tail_record(len(fresh))


def test_truncating_beyond_the_end_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot cut a chain of 3 tokens to 4"):
        chain(T(3)).truncate(4)


def test_tenants_share_the_public_blocks_and_no_parent_after_them() -> None:
    one, other = (chain(T(16), tenant=name, public_tokens=9) for name in ("a", "b"))
    assert one.hashes[:2] == other.hashes[:2]
    assert not set(one.hashes[2:]) & set(other.hashes[2:])
    assert one.parent(2) == tenant_parent(one.hashes[1], "a") != other.parent(2)
    assert [one.starts_domain(block) for block in range(4)] == [True, False, True, False]


def test_a_block_is_public_only_while_all_before_it_begins_a_public_prompt() -> None:
    shared = chain(T(16), public_tokens=12).hashes
    left = chain([*T(4), *T(4, 40), *T(12)[8:]], public_tokens=12)
    assert left.hashes[0] == shared[0]
    assert left.parent(1) == tenant_parent(shared[0], "local")
    assert left.parent(2) == left.hashes[1]  # the public tokens that follow are not public here
    assert not set(left.hashes[1:]) & set(shared)


def test_a_public_prefix_is_found_however_the_chain_grew() -> None:
    built = chain(T(16), public_tokens=8)
    grown = chain(public_tokens=8)
    for token in T(16):
        grown.append(token)
    resumed = chain(T(16), public_tokens=8, hashes=built.hashes[:1])
    assert grown.hashes == resumed.hashes == built.hashes
    assert grown.parents(4) == resumed.parents(4) == built.parents(4)


def test_hashes_from_before_a_declaration_go_on_as_they_were() -> None:
    private = chain(T(8))
    resumed = chain(T(12), public_tokens=12, hashes=private.hashes)
    assert resumed.hashes == chain(T(12)).hashes
    assert resumed.parents(3) == chain(T(12)).parents(3)


def test_an_unfilled_tail_is_its_tenants_also_inside_a_public_prefix() -> None:
    one, other = (chain(T(6), tenant=name, public_tokens=12) for name in ("a", "b"))
    tails = one.tail_record(6), other.tail_record(6)
    assert tails[0] is not None
    assert tails[1] is not None
    assert tails[0].parent == tenant_parent(one.hashes[0], "a")
    assert tails[0].key != tails[1].key
    one.extend(T(12)[6:])
    assert one.parent(1) == one.hashes[0]


def test_records_name_key_parent_and_tokens() -> None:
    built = chain(T(9))
    record = built.block_record(1)
    assert (record.key, record.parent) == (built.hashes[1], built.hashes[0])
    assert record.token_ids == tuple(T(9)[4:8])
    assert built.tail_record(8) is None


def test_a_tail_is_never_mistaken_for_a_full_block() -> None:
    tokens = tuple(T(4))
    assert partial_key(ROOT, tokens) != full_key(ROOT, tokens)
