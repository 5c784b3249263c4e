"""Equal hashes of unequal blocks are never a hit: parent and tokens are compared as well."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest

from sessionkv.cache import chain
from sessionkv.cache.matching import find
from sessionkv.cache.prefix_index import Entry, PrefixIndex
from sessionkv.cache.sequence import StagedBlock
from sessionkv.types import BlockHash, BlockRecord, DiskBlock, DiskReceipt, Tier
from tests.builders.checksum import cold_oracle, tokens
from tests.builders.kv_world import ROOT
from tests.builders.mini_engine import DictDisk, MiniEngine

CHAIN = chain.TokenChain(ROOT, 4, tenant="local", token_ids=tokens(9))


@pytest.fixture
def one_hash_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks at one place of any two chains have the same hash."""

    def by_depth(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
        del token_ids
        return BlockHash(hashlib.sha256(parent).digest())

    monkeypatch.setattr(chain, "full_key", by_depth)


@pytest.mark.usefixtures("one_hash_for_all")
@pytest.mark.parametrize("shared", [0, 4])
@pytest.mark.parametrize("tier", list(Tier))
def test_a_prompt_never_gets_the_blocks_of_another(tier: Tier, shared: int) -> None:
    engine = MiniEngine(
        24 if tier is Tier.DEVICE else 6,
        host_blocks=32 if tier is Tier.HOST else 0,
        disk=DictDisk() if tier is Tier.DISK else None,
    )
    prompts = [[*tokens(shared), *tokens(12, start=40 * i), 200 + i] for i in range(1, 4)]
    for _ in range(3):
        for prompt in prompts:
            seq_id = engine.submit(prompt, 4)
            engine.run()
            assert engine.outputs[seq_id] == cold_oracle(prompt, 4)
            engine.assert_idle()


@pytest.mark.usefixtures("one_hash_for_all")
def test_two_at_once_share_nothing() -> None:
    engine = MiniEngine(24)
    prompts = [[*tokens(12, start=40 * i), 200 + i] for i in range(3)]
    ids = [engine.submit(prompt, 4) for prompt in prompts]
    engine.run()
    for prompt, seq_id in zip(prompts, ids, strict=True):
        assert engine.outputs[seq_id] == cold_oracle(prompt, 4)
        assert engine.reports[seq_id].cached_tokens == 0
    engine.assert_idle()


OTHER = [
    BlockRecord(CHAIN.hashes[0], CHAIN.parent(0), (1, 2, 3, 4)),
    BlockRecord(CHAIN.hashes[0], CHAIN.hashes[1], tuple(CHAIN.token_ids[:4])),
]


@pytest.mark.parametrize("record", OTHER, ids=["tokens", "parent"])
@pytest.mark.parametrize("place", ["device", "host", "staged", "disk"])
def test_other_tokens_or_another_parent_are_no_match_wherever_the_block_is(
    place: str, record: BlockRecord
) -> None:
    for is_own in (False, True):
        found_record = CHAIN.block_record(0) if is_own else record
        index = PrefixIndex()
        if place in ("device", "host"):
            index.add(Entry(found_record, **{place: 3}))
        staged = StagedBlock(found_record, 3, 1, False)
        found = find(
            CHAIN,
            index,
            staged={found_record.key: staged} if place == "staged" else {},
            coming=(),
            receipt=DiskReceipt(1, (DiskBlock(found_record, 3),), None)
            if place == "disk"
            else None,
            disk=True,
            version=0,
        )
        assert found.num_blocks == is_own
