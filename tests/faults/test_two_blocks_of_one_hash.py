"""Equal hashes of unequal blocks are never a hit: parent and tokens are compared as well."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest

from sessionkv.cache import chain
from sessionkv.types import BlockHash, Tier
from tests.builders.checksum import cold_oracle, tokens
from tests.builders.mini_engine import DictDisk, MiniEngine


@pytest.fixture(autouse=True)
def one_hash_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks at one place of any two chains have the same hash."""

    def by_depth(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
        del token_ids
        return BlockHash(hashlib.sha256(parent).digest())

    monkeypatch.setattr(chain, "full_key", by_depth)


@pytest.mark.parametrize("tier", list(Tier))
def test_a_prompt_never_gets_the_blocks_of_another(tier: Tier) -> None:
    engine = MiniEngine(
        24 if tier is Tier.DEVICE else 8,
        host_blocks=32 if tier is Tier.HOST else 0,
        disk=DictDisk() if tier is Tier.DISK else None,
    )
    prompts = [[*tokens(12, start=40 * i), 200 + i] for i in range(3)]
    for _ in range(3):
        for prompt in prompts:
            seq_id = engine.submit(prompt, 4)
            engine.run()
            assert engine.outputs[seq_id] == cold_oracle(prompt, 4)
            engine.assert_idle()


def test_two_at_once_share_nothing() -> None:
    engine = MiniEngine(24)
    prompts = [[*tokens(12, start=40 * i), 200 + i] for i in range(3)]
    ids = [engine.submit(prompt, 4) for prompt in prompts]
    engine.run()
    for prompt, seq_id in zip(prompts, ids, strict=True):
        assert engine.outputs[seq_id] == cold_oracle(prompt, 4)
        assert engine.reports[seq_id].cached_tokens == 0
    engine.assert_idle()
