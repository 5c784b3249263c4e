"""Room for a long history is made a part at a time. Block size 4, exact keys."""

import pytest

from sessionkv.cache.block_pool import LeaseError
from sessionkv.types import BlockHash, Match
from tests.builders.kv_world import T, World


def crowded() -> tuple[World, list[list[BlockHash]]]:
    """Five histories of four blocks: the first on the host alone, the next two there as well."""
    world = World(device_blocks=16, host_blocks=20, clean_ahead=2)
    starts = range(0, 500, 100)
    for start in starts:
        world.turn(T(16, start))
        world.make_room()
    world.make_room()
    hashes = [world.chain(T(16, start)).hashes for start in starts]
    assert world.device_keys() == {key for history in hashes[1:] for key in history}
    return world, hashes


def make_room(world: World, tokens: list[int], most_blocks: int) -> tuple[bool, Match]:
    chain = world.chain(tokens)
    match = world.kv.match(chain)
    is_enough = world.kv.make_room(chain, match, room_tokens=len(tokens), most_blocks=most_blocks)
    world.kv.check()
    return is_enough, match


def test_the_coldest_go_so_many_at_a_time_until_the_rest_is_no_more_than_that() -> None:
    world, (_, second, third, *warm) = crowded()
    kept = {key for history in warm for key in history}
    tokens = [*T(16), 1]  # needs five blocks
    assert not make_room(world, tokens, 2)[0]
    assert world.device_keys() == {*second[:2], *third, *kept}
    assert not make_room(world, tokens, 2)[0]
    assert world.device_keys() == {*third, *kept}
    is_enough, match = make_room(world, tokens, 2)
    assert is_enough
    assert world.device_keys() == {*third, *kept}
    chain = world.chain(tokens)
    assert world.kv.admit(9, chain, match, room_tokens=len(chain)) is not None
    assert world.device_keys() == {*third[:3], *kept}
    world.kv.finish(9)
    world.kv.check()


def test_what_is_matched_does_not_go() -> None:
    world, (_, second, third, *_) = crowded()
    is_enough, _ = make_room(world, [*T(16, 100), *range(16)], 2)  # behind the coldest of all
    assert not is_enough
    assert {*second, *third[:2]} <= world.device_keys()
    assert not {*third[2:]} & world.device_keys()


def test_where_the_next_to_go_is_to_be_copied_first_nothing_goes() -> None:
    world = World(device_blocks=8, host_blocks=12)
    world.turn(T(16))
    world.turn(T(16, 100))
    before = world.device_keys()
    tokens = T(20, 200)
    is_enough, match = make_room(world, tokens, 2)
    assert is_enough
    assert world.device_keys() == before
    chain = world.chain(tokens)
    assert world.kv.admit(9, chain, match, room_tokens=len(chain)) is None


def test_a_match_is_of_no_use_after_a_part() -> None:
    world, _ = crowded()
    tokens = [*T(16), 1]
    is_enough, match = make_room(world, tokens, 2)
    assert not is_enough
    with pytest.raises(LeaseError, match="has changed"):
        world.kv.make_room(world.chain(tokens), match, room_tokens=17, most_blocks=2)
