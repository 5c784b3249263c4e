"""The bounded memory of what is gone."""

from sessionkv.cache.evicted import EvictedKeys
from sessionkv.types import BlockHash


def key(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def test_the_oldest_is_forgotten_first_and_adding_again_renews() -> None:
    gone = EvictedKeys(limit=3)
    for number in (1, 2, 3, 1, 4):
        gone.add(key(number))
    assert [number for number in range(6) if key(number) in gone] == [1, 3, 4]
    assert len(gone) == 3


def test_damage_is_remembered_until_the_block_is_back() -> None:
    gone = EvictedKeys()
    gone.add(key(1), corrupt=True)
    gone.add(key(2))
    assert gone.was_corrupt(key(1))
    assert not gone.was_corrupt(key(2))
    assert not gone.was_corrupt(key(3))
    gone.discard(key(1))
    gone.discard(key(9))
    assert key(1) not in gone
    assert not gone.was_corrupt(key(1))
