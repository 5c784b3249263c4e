"""Sessions that leave one engine and go on in another, over the socket's messages."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sessionkv.actor.imports import ImportDesk
from sessionkv.client.portable import export_trees, import_tree
from sessionkv.errors import (
    InvalidRequest,
    NodeNotFound,
    Overloaded,
    SessionExists,
    SessionNotFound,
    TurnKind,
)
from sessionkv.ipc import messages as wire
from sessionkv.types import MissReason, NodeRecord
from sessionkv.types.portable import PortableSession
from sessionkv.types.portable_tree import PortableTree
from tests.builders import text as built
from tests.builders.engine import CheckedEngine, engine_config, greedy, open_engine, socket_engine
from tests.builders.store import node

SHORT = greedy(6)


def gathered(items: Sequence[NodeRecord | PortableSession]) -> PortableTree:
    tree = PortableTree()
    for item in items:
        if isinstance(item, PortableSession):
            tree.add_session(item)
        else:
            tree.add_node(item)
    return tree


def shape(engine: CheckedEngine, *names: str) -> dict[str, list[int]]:
    """Node ids of each session's path, in numbers of their order."""
    tree = engine.parts.tree
    paths = {n: [r.node_id for r in tree.path(tree.head("local", n).node_id)] for n in names}
    order = sorted({node_id for path in paths.values() for node_id in path})
    return {name: [order.index(node_id) for node_id in path] for name, path in paths.items()}


def log_of(engine: CheckedEngine, name: str) -> list[int]:
    tree = engine.parts.tree
    return list(tree.tokens_of(tree.head("local", name).node_id))


def test_a_family_of_forks_goes_on_as_if_it_had_never_moved(tmp_path: Path) -> None:
    with open_engine(engine_config(tmp_path / "a")) as engine:
        trip = engine.open("trip", system="Be brief.", tools=[{"name": "f"}])
        trip.turn("one", sampling=SHORT)
        trip.fork("other").turn("aside", sampling=SHORT)
        trip.turn("two", sampling=SHORT)
        names = ["other", "trip"]
        tree = gathered(list(export_trees(engine, names)))
        assert [node.kind for node in tree.nodes].count("root") == 1
        assert len(tree.nodes) == 4  # the shared turn came once
        logs = {name: log_of(engine, name) for name in names}
        shapes = shape(engine, *names)
        infos = {name: engine.session(name).info(history=True) for name in names}
        next_turn = trip.turn("three", sampling=SHORT)
    with open_engine(engine_config(tmp_path / "b")) as engine:
        engine.open("before").turn("x", sampling=SHORT)  # numbers of turns differ
        value = import_tree(engine, tree)
        assert value == {"sessions": names, "turns": 3, "other_tokenizer": []}
        assert {name: log_of(engine, name) for name in names} == logs
        assert shape(engine, *names) == shapes
        for name in names:
            info = engine.session(name).info(history=True)
            assert info.messages == infos[name].messages
            assert (info.created_s, info.updated_s) == (
                infos[name].created_s,
                infos[name].updated_s,
            )
        same = engine.open("trip", system="Be brief.", tools=[{"name": "f"}])
        resumed = same.turn("three", sampling=SHORT)
        assert (resumed.tokens, resumed.text) == (next_turn.tokens, next_turn.text)
        assert resumed.usage == next_turn.usage
        assert resumed.cache.miss.reason is MissReason.NOT_STORED
        engine.assert_ledger()
    with open_engine(engine_config(tmp_path / "b")) as engine:
        assert engine.session("trip").info().turns == 3
        assert engine.session("other").info().turns == 2
        assert log_of(engine, "other") == logs["other"]


def test_a_taken_name_is_refused_and_nothing_is_imported(tmp_path: Path) -> None:
    with open_engine(engine_config(tmp_path / "a")) as engine:
        engine.open("a").turn("x", sampling=SHORT)
        engine.session("a").fork("b")
        tree = gathered(list(export_trees(engine, ["a", "b"])))
        engine.delete("b")
        nodes = engine.parts.tree.num_nodes
        with pytest.raises(SessionExists, match="'a'"):
            import_tree(engine, tree)
        assert [info.name for info in engine.sessions()] == ["a"]
        assert engine.parts.tree.num_nodes == nodes
        engine.delete("a")
        assert import_tree(engine, tree)["sessions"] == ["a", "b"]


def test_another_tokenizer_encodes_anew_at_the_next_turn(tmp_path: Path) -> None:
    with open_engine(engine_config(tmp_path / "a", blocks=512)) as engine:
        engine.open("a").turn("one", sampling=SHORT)
        engine.open("raw").turn(tokens=[1, 2], sampling=SHORT)
        trees = [gathered(list(export_trees(engine, [name]))) for name in ("a", "raw")]
        messages = engine.session("a").info(history=True).messages
    folder = tmp_path / "text"
    folder.mkdir()
    built.write_folder("llama3", folder)
    config = engine_config(tmp_path / "b", blocks=512)
    with open_engine(config, runner={"text_dir": folder}) as engine:
        assert [import_tree(engine, tree)["other_tokenizer"] for tree in trees] == [["a"], ["raw"]]
        assert engine.session("a").info(history=True).messages == messages
        again = engine.session("a").turn("two", sampling=SHORT)
        assert again.cache.miss.reason is MissReason.IDENTITY_CHANGED
        with pytest.raises(TurnKind, match="another tokenizer"):
            engine.session("raw").turn(tokens=[3], sampling=SHORT)
        engine.assert_ledger()


def test_what_cannot_be_read_or_does_not_fit_is_refused(tmp_path: Path) -> None:
    with open_engine(engine_config(tmp_path / "a")) as engine:
        engine.open("a").turn("x", sampling=SHORT)
        root, turn, session = list(export_trees(engine, ["a"]))
        assert isinstance(root, NodeRecord)
        assert isinstance(turn, NodeRecord)
        assert isinstance(session, PortableSession)
        engine.delete("a")
        for bad in (
            replace(turn, incoming_blob=b"no json"),
            replace(turn, incoming_blob=b'[{"role": "nobody", "content": "x"}]'),
            replace(turn, reply_blob=b"{}"),
            replace(turn, reply_blob=b'{"content": 3}'),
            replace(turn, token_ids=b"\xff\xff\xff\xff", num_incoming_tokens=0),
            replace(turn, sampling_blob=b"{"),
        ):
            with pytest.raises(InvalidRequest):
                import_tree(engine, gathered([root, bad, session]))
        with pytest.raises(InvalidRequest):
            import_tree(
                engine, gathered([replace(root, incoming_blob=b'{"system": 1}'), turn, session])
            )
        unreached = gathered([root, turn, replace(session, node_id=root.node_id)])
        with pytest.raises(InvalidRequest, match="a session leads to"):
            import_tree(engine, unreached)
        assert engine.sessions() == []
        assert engine.parts.tree.num_nodes == 0
        # Nothing of the refused ones is held.
        import_tree(engine, gathered([root, turn, session]))
        assert engine.session("a").info().turns == 1


def test_a_session_that_is_gone_or_rewound_while_it_is_exported(tmp_path: Path) -> None:
    with open_engine(engine_config(tmp_path / "a")) as engine:
        engine.open("a").turn("x", sampling=SHORT)
        with pytest.raises(SessionNotFound):
            list(export_trees(engine, ["a", "b"]))
        assert gathered(list(export_trees(engine, ["b", "a"], skip_missing=True))).sessions
        path = engine._call(wire.Export, {"session": "a"})["path"]
        engine.session("a").rewind()
        with pytest.raises(NodeNotFound):
            engine._call(wire.Export, {"session": "a", "nodes": path})


def test_what_a_lost_connection_had_sent_is_forgotten(tmp_path: Path) -> None:
    with open_engine(engine_config(tmp_path / "a")) as engine:
        engine.open("a").turn("x", sampling=SHORT)
        root, turn, session = list(export_trees(engine, ["a"]))
    with socket_engine(tmp_path) as engine:
        with engine.client() as client:
            held = client._call(wire.Import, {"nodes": [root, turn]})
            assert held == {"held": 2}
        with engine.client() as client:
            with pytest.raises(InvalidRequest, match="a turn that came before"):
                client._call(wire.Import, {"sessions": [session], "commit": True})
            assert client.sessions() == []


def test_what_is_held_is_bounded_over_all_connections() -> None:
    tree = PortableTree()
    tree.add_node(node(1, incoming_blob=b"{}", reply_blob=b"", tokenizer_digest="other"))
    size = tree.num_bytes
    desk = ImportDesk(built.llama3(), max_bytes=2 * size)
    request = wire.Import(0, nodes=tree.nodes)
    assert desk.add(b"a", "t", request).nodes == tree.nodes
    desk.add(b"b", "t", request)
    with pytest.raises(Overloaded, match="cannot be imported at once"):
        desk.add(b"c", "t", request)
    desk.drop(b"a")
    desk.add(b"c", "t", request)
    with pytest.raises(Overloaded):
        desk.add(b"b", "t", wire.Import(1, nodes=[replace(tree.nodes[0], node_id=2)]))
    desk.add(b"a", "t", request)  # what b had sent is not held any longer


def test_a_tenant_that_holds_all_of_it_leaves_others_their_share() -> None:
    tree = PortableTree()
    tree.add_node(node(1, incoming_blob=b"{}", reply_blob=b"", tokenizer_digest="other"))
    desk = ImportDesk(built.llama3(), max_bytes=4 * tree.num_bytes)
    request = wire.Import(0, nodes=tree.nodes)
    for connection in (b"a", b"b", b"c", b"d"):
        desk.add(connection, "flood", request)
    with pytest.raises(Overloaded) as raised:
        desk.add(b"e", "flood", request)
    assert raised.value.details["allowed_bytes"] == 4 * tree.num_bytes
    desk.add(b"f", "victim", request)
    desk.add(b"g", "victim", request)
    with pytest.raises(Overloaded) as raised:
        desk.add(b"h", "victim", request)
    assert raised.value.details["allowed_bytes"] == 2 * tree.num_bytes
