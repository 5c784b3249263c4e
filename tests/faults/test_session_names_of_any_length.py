"""Long names, odd names and names equal in their first 511 characters are sessions of their own."""

import pytest

from sessionkv.errors import InvalidRequest
from tests.builders.tree import TENANT, Sessions, snapshot

LONG = "x" * 511
GOOD = [
    "a",
    LONG,
    LONG + "1",
    LONG + "2",
    "y" * 4000,
    "z" * 4096,
    "\U0001f600",
    "\U0001f600" * 1024,
    "a/b/../c",
    " ",
    "\n",
]
BAD = ["", "a\0b", "\0", "z" * 4097, "é" * 2049, "ok\ud83d", 7, None, b"a"]


def test_each_name_is_its_own_session_also_after_a_restart():
    s = Sessions()
    for i, name in enumerate(GOOD):
        s.open(name)
        s.turn(name, [i, i + 1])
    s.restart()
    for i, name in enumerate(GOOD):
        assert s.tokens(name) == [i, i + 1]
    listed = sorted(name for _, name in s.journal.heads)
    assert listed == sorted(GOOD)


@pytest.mark.parametrize("name", BAD)
def test_bad_names_are_refused_by_field_and_nothing_is_made(name):
    s = Sessions()
    s.open("a")
    before = snapshot(s.tree)
    with pytest.raises(InvalidRequest) as error:
        s.open(name)
    assert error.value.details["field"] == "session"
    with pytest.raises(InvalidRequest) as error:
        s.tree.fork(TENANT, "a", name if name is not None else "", now=2.0)
    assert error.value.details["field"] == "name"
    assert snapshot(s.tree) == before
