"""A turn that began on another state of the session can never be committed over it."""

import pytest

from sessionkv.errors import SessionBusy, SessionNotFound
from tests.builders.tree import TENANT, Sessions, new_turn, snapshot


def test_of_two_turns_on_one_node_only_the_first_is_committed():
    s = Sessions()
    s.open("a")
    base = s.turn("a", [1, 2]).node_id
    s.commit(s.tree.append_turn(TENANT, "a", new_turn([1, 2], [3]), base_id=base, now=3.0))
    before = snapshot(s.tree)
    for late in ([4], [5]):
        with pytest.raises(SessionBusy):
            s.tree.append_turn(TENANT, "a", new_turn([1, 2], late), base_id=base, now=4.0)
    assert snapshot(s.tree) == before
    assert s.tokens("a") == [1, 2, 3]


def test_a_turn_of_a_session_that_was_deleted_and_made_anew_is_refused():
    s = Sessions()
    s.open("a")
    base = s.turn("a", [1, 2]).node_id
    s.commit(s.tree.delete(TENANT, "a"))
    with pytest.raises(SessionNotFound):
        s.tree.append_turn(TENANT, "a", new_turn([1, 2], [3]), base_id=base, now=3.0)
    s.open("a")
    with pytest.raises(SessionBusy):
        s.tree.append_turn(TENANT, "a", new_turn([1, 2], [3]), base_id=base, now=3.0)
    assert s.tokens("a") == []
