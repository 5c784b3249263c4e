"""Shares of what is bounded for all: one alone has everything, nobody takes another's."""

import pytest

from sessionkv.types.holdings import Holdings


def filled(**held: int) -> Holdings:
    made = Holdings()
    for who, amount in held.items():
        made.add(who, amount)
    return made


def test_one_alone_has_everything() -> None:
    held = filled(a=9)
    assert held.has_room("a", 10)
    assert not held.has_room("a", 10, 2)
    held.add("a", 1)
    assert (held.of("a"), held.total, held.share("a", 10)) == (10, 10, 10)
    assert not held.has_room("a", 10)


def test_whoever_comes_later_has_a_share_all_the_same() -> None:
    held = filled(a=10)
    for _ in range(5):
        assert held.has_room("b", 10)
        held.add("b", 1)
    assert not held.has_room("b", 10)
    assert held.has_room("c", 10, 3)
    assert not held.has_room("c", 10, 4)


def test_past_its_share_one_has_what_nobody_uses() -> None:
    held = filled(a=6, b=1)
    assert held.share("a", 10) == 5
    assert held.has_room("a", 10, 3)
    assert not held.has_room("a", 10, 4)


def test_who_holds_nothing_any_more_takes_no_share() -> None:
    held = filled(a=2, b=3)
    assert held.largest() == "b"
    held.add("b", -3)
    assert (held.largest(), held.total, held.share("a", 10)) == ("a", 2, 10)
    held.add("a", -2)
    assert held.largest() is None
    assert Holdings({"a": 0, "b": 1}).share("b", 4) == 4


@pytest.mark.parametrize("holders", [1, 2, 3, 7])
def test_how_far_all_together_may_be_past_the_limit(holders: int) -> None:
    held, limit = Holdings(), 420
    for number in range(holders):
        while held.has_room(str(number), limit):
            held.add(str(number), 1)
    assert held.total == sum(limit // (number + 1) for number in range(holders))
