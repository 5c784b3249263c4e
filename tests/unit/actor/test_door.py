"""From a greeting to a tenant; and which grants outlive a change of the keys."""

from dataclasses import replace

import pytest

from sessionkv.actor.door import Door, Grant
from sessionkv.errors import Forbidden, Unauthorized
from sessionkv.ipc.messages import Hello
from sessionkv.types.access import Access, key_digest
from tests.builders.tenants import KEYS, access, entry

DOOR = Door(access())


def hello(key: str | None = None, tenant: str | None = None) -> Hello:
    return Hello(1, key=key, tenant=tenant)


def test_an_open_door_asks_nothing() -> None:
    assert Door(Access()).admit(hello()) == Grant("local", True)
    assert Door(Access()).admit(hello("whatever", "t")) == Grant("t", True)


def test_a_key_gives_its_tenant() -> None:
    granted = DOOR.admit(hello(KEYS["bob"]))
    assert granted == Grant("bob", False, key_digest(KEYS["bob"]))
    assert DOOR.admit(hello(KEYS["root"], "bob")).tenant == "bob"
    assert DOOR.admit(hello(KEYS["root"])).tenant == "root"


@pytest.mark.parametrize("key", [None, "", "nobody", KEYS["bob"] + "x", KEYS["bob"][:-1]])
def test_others_are_refused_in_the_same_words(key: str | None) -> None:
    with pytest.raises(Unauthorized) as raised:
        DOOR.admit(hello(key))
    with pytest.raises(Unauthorized) as nothing:
        DOOR.admit(hello(None, "bob"))
    assert raised.value.to_wire() == nothing.value.to_wire()


def test_only_an_operator_acts_for_others() -> None:
    with pytest.raises(Forbidden):
        DOOR.admit(hello(KEYS["bob"], "alice"))
    assert DOOR.admit(hello(KEYS["bob"], "bob")).tenant == "bob"


@pytest.mark.parametrize(
    ("keys", "allowed"),
    [
        ((entry("bob"),), True),
        ((entry("alice"),), False),
        ((replace(entry("bob"), name="renamed"),), True),
        ((replace(entry("bob"), tenant="other"),), False),
        ((replace(entry("bob"), operator=True),), True),
        ((), True),
    ],
)
def test_which_grants_outlive_a_change(keys, allowed: bool) -> None:
    assert Door(Access(keys)).still_allows(DOOR.admit(hello(KEYS["bob"]))) is allowed


def test_an_operator_that_is_none_any_more_is_cut() -> None:
    for tenant in (None, "bob"):
        grant = DOOR.admit(hello(KEYS["root"], tenant))
        assert DOOR.still_allows(grant)
        assert not Door(Access((replace(entry("root"), operator=False),))).still_allows(grant)


def test_those_of_before_there_were_keys_are_cut() -> None:
    assert not DOOR.still_allows(Door(Access()).admit(hello()))
