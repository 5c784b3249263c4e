"""Every length of what is cached, every place to leave it, every tier it may be in."""

from __future__ import annotations

import pytest

from sessionkv.types import Tier
from tests.builders.kv_world import B, T, World

NEW = [90, 91, 92]


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("length", range(2 * B, 3 * B + 1))
def test_a_rewound_conversation_reuses_exactly_what_it_kept(length: int, tier: Tier) -> None:
    """For each fill of the last block and each token at which the history is left."""
    for cut in range(1, length + 1):
        world = World(
            device_blocks=8,
            host_blocks=16 if tier is Tier.HOST else 0,
            disk_blocks=32 if tier is Tier.DISK else 0,
        )
        world.turn(T(length))
        if tier is not Tier.DEVICE:
            world.turn([1] * (8 * B))
        prompt = [*T(length)[:cut], *NEW]
        run = world.turn(prompt)
        where = {
            Tier.DEVICE: run.admission.device_tokens,
            Tier.HOST: run.admission.host_tokens,
            Tier.DISK: run.admission.disk_tokens,
        }
        assert where[tier] == run.admission.cached_tokens == cut, (cut, where)
        again = world.turn([*T(length), *NEW])
        assert again.admission.cached_tokens >= min(length, cut + 1) - (B - 1)
        world.assert_idle()


@pytest.mark.parametrize("fork", range(1, 3 * B))
def test_forks_at_every_token_share_all_before_it(fork: int) -> None:
    world = World(device_blocks=32)
    world.turn(T(3 * B))
    runs = []
    for mark in (90, 91, 92):
        run = world.admit(world.chain([*T(3 * B)[:fork], *[mark] * 5]))
        assert run is not None
        assert run.admission.cached_tokens == fork
        world.stage_now(run, len(run.chain))
        runs.append(run)
    world.execute()
    world.check()
    shared = {tuple(world.kv.block_table(run.seq_id)[: fork // B]) for run in runs}
    assert len(shared) == 1
    for run in runs:
        world.finish(run)
    world.assert_idle()


@pytest.mark.parametrize("kept", range(3 * B + 2))
@pytest.mark.parametrize("written", range(1, 3 * B + 2))
def test_a_turn_that_is_cut_leaves_what_was_kept(written: int, kept: int) -> None:
    world = World(device_blocks=16)
    run = world.admit(world.chain(T(3 * B + 4)))
    assert run is not None
    world.stage_now(run, written)
    world.execute()
    world.finish(run, kept)
    world.check()
    matched = world.kv.match(world.chain(T(3 * B + 4))).num_tokens
    full = written - written % B
    assert matched == max(full, min(written, kept))
    world.assert_idle()
