from dataclasses import replace

import pytest

from sessionkv.errors import InvalidRequest
from sessionkv.types import HeadRecord
from sessionkv.types.portable import (
    PortableSession,
    node_from_map,
    node_to_map,
    session_from_map,
    session_to_map,
)
from sessionkv.types.portable_tree import PortableTree
from tests.builders.store import node

TURN = node(7, 3, token_ids=bytes(12), num_incoming_tokens=2)
SESSION = PortableSession("träume", 7, "follow", 1.5, 2.5)


def test_maps_come_back_as_they_were_and_unknown_keys_are_ignored() -> None:
    assert node_from_map(node_to_map(TURN)) == TURN
    assert node_from_map(node_to_map(TURN) | {"later": 1}) == TURN
    assert node_from_map(node_to_map(node(3))) == node(3)
    assert session_from_map(session_to_map(SESSION) | {"later": 1}) == SESSION


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("node_id", 0),
        ("node_id", True),
        ("node_id", 2**63),
        ("parent_id", 7),
        ("parent_id", None),
        ("parent_id", "3"),
        ("kind", "root"),
        ("kind", "other"),
        ("token_ids", bytes(3)),
        ("token_ids", [1, 2]),
        ("num_incoming_tokens", 4),
        ("num_incoming_tokens", -1),
        ("incoming_blob", "text"),
        ("reply_blob", None),
        ("finish_reason", "x" * 129),
        ("closed", 1),
        ("tokenizer_digest", "\ud800"),
        ("chain_hash", bytes(31)),
        ("created_s", float("nan")),
        ("created_s", True),
        ("num_unwritten_tokens", None),
    ],
)
def test_a_field_that_is_not_allowed_is_named(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        node_from_map(node_to_map(TURN) | {name: value}, field="nodes[2]")
    shown = "kind" if (name, value) == ("parent_id", None) else name
    assert caught.value.details["field"] == f"nodes[2].{shown}"


@pytest.mark.parametrize(
    ("name", "value"),
    [("name", 3), ("node_id", None), ("history", "other"), ("updated_s", "now")],
)
def test_a_field_of_a_session_too(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        session_from_map(session_to_map(SESSION) | {name: value})
    assert caught.value.details["field"] == f"session.{name}"
    with pytest.raises(InvalidRequest):
        session_from_map([SESSION])


def test_pins_and_tenants_stay_behind() -> None:
    head = HeadRecord("local", "a", 7, "host", 99.0, 70, "keep", 1.0, 2.0)
    assert PortableSession.of(head).to_head("other", 12) == HeadRecord(
        "other", "a", 12, "", None, 0, "keep", 1.0, 2.0
    )


def test_a_tree_gets_new_numbers_and_keeps_its_shape() -> None:
    tree = PortableTree()
    for record in (node(3), node(7, 3), node(20, 3), node(21, 7)):
        tree.add_node(record)
    for name, node_id in (("a", 21), ("b", 20), ("c", 3)):
        tree.add_session(replace(SESSION, name=name, node_id=node_id))
    nodes, heads = tree.placed("local", 100)
    assert [(item.node_id, item.parent_id) for item in nodes] == [
        (100, None), (101, 100), (102, 100), (103, 101)
    ]  # fmt: skip
    assert [(head.name, head.node_id) for head in heads] == [("a", 103), ("b", 102), ("c", 100)]
    assert tree.num_bytes > 4 * 512


def test_what_does_not_fit_a_tree_is_refused() -> None:
    tree = PortableTree()
    tree.add_node(node(3))
    for bad in (node(3), node(9, 8)):
        with pytest.raises(InvalidRequest):
            tree.add_node(bad)
    tree.add_node(node(4, 3, kind="raw"))
    with pytest.raises(InvalidRequest, match="raw, as the turn before"):
        tree.add_node(node(5, 4, kind="chat"))
    with pytest.raises(InvalidRequest):
        tree.add_session(replace(SESSION, node_id=5))
    tree.add_session(replace(SESSION, node_id=3))
    with pytest.raises(InvalidRequest, match="not given before"):
        tree.add_session(replace(SESSION, node_id=4))
    with pytest.raises(InvalidRequest, match="a session leads to"):
        tree.placed("local", 1)
