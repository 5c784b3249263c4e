"""What a client has kept with a turn, and everything else that is kept of one: ``node``."""

from __future__ import annotations

from pathlib import Path

import pytest

from sessionkv.actor.imports import ImportDesk
from sessionkv.client.portable import export_trees, import_tree
from sessionkv.errors import InvalidRequest, NodeNotFound, SessionNotFound
from sessionkv.ipc import messages as wire
from sessionkv.types import FinishReason
from sessionkv.types.portable import PortableSession
from sessionkv.types.portable_tree import PortableTree
from tests.builders import text as built
from tests.builders.doors import KINDS, open_door
from tests.builders.engine import engine_config, greedy, open_engine
from tests.builders.store import node
from tests.builders.tenants import access, tenants

SHORT = greedy(6)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
KEPT = {"id": "resp_1", "tags": ["é", None, True, 2, 0.5], "deep": {"a": {"b": "c"}}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_is_given_back_with_what_was_kept_with_it(kind: str) -> None:
    with open_door(kind, engine_config(blocks=256)) as door:
        session = door.client.open("a", system="Be brief.", tools=[TOOL], metadata={"of": "root"})
        first = session.turn("one", sampling=SHORT, metadata=KEPT)
        second = session.turn("two", sampling=SHORT)
        found = session.node(first.node)
        assert found.metadata == KEPT
        assert (found.node, found.turns, found.kind) == (first.node, 1, "chat")
        assert (found.system, list(found.tools)) == ("Be brief.", [TOOL])
        assert list(found.messages) == [{"role": "user", "content": "one"}]
        assert found.reply == {"role": "assistant", "content": first.text}
        assert found.finish_reason is FinishReason.LENGTH
        assert dict(found.usage) == {
            "prompt_tokens": first.usage.prompt_tokens,
            "completion_tokens": 6,
            "cached_tokens": 0,
        }
        last = session.node()
        assert (last.node, last.parent, last.metadata) == (second.node, first.node, {})
        assert last.usage["cached_tokens"] == second.cache.cached_tokens > 0
        root = session.node(found.parent)
        assert (root.kind, root.parent, root.reply) == ("root", None, None)
        assert (root.metadata, root.usage, root.finish_reason) == ({"of": "root"}, {}, None)
        assert session.nodes() == [root, found, last]
        assert session.nodes(first.node) == [root, found]
        # Of a session that exists nothing is changed, and nothing compared.
        door.client.open("a", metadata={"of": "another"})
        assert session.node(root.node).metadata == {"of": "root"}


def test_metadata_survives_a_restart_and_a_move_to_another_engine(tmp_path: Path) -> None:
    with open_engine(engine_config(tmp_path / "a")) as engine:
        turn = engine.open("a").turn("one", sampling=SHORT, metadata=KEPT)
    with open_engine(engine_config(tmp_path / "a")) as engine:
        before = engine.session("a").node(turn.node)
        assert (before.metadata, before.reply) == (
            KEPT,
            {"role": "assistant", "content": turn.text},
        )
        tree = PortableTree()
        for item in export_trees(engine, ["a"]):
            if isinstance(item, PortableSession):
                tree.add_session(item)
            else:
                tree.add_node(item)
    with open_engine(engine_config(tmp_path / "b")) as engine:
        import_tree(engine, tree)
        after = engine.session("a").node()
        assert (after.metadata, after.usage) == (KEPT, before.usage)


def test_a_node_is_found_on_the_sessions_own_path_alone() -> None:
    with open_engine(engine_config()) as engine:
        session = engine.open("a")
        session.turn("one", sampling=SHORT)
        other = engine.open("b").turn("two", sampling=SHORT)
        for name in (other.node, "n-999"):
            with pytest.raises(NodeNotFound):
                session.node(name)
        with pytest.raises(InvalidRequest, match="node id"):
            session.node("resp_1")
        with pytest.raises(SessionNotFound):
            engine.session("c").node()


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        ({"a": "x" * 65_536}, "metadata"),
        ({"a": {"b": float("nan")}}, "metadata.*a.b"),
        ({"a": "\ud83d"}, "metadata.*a"),
        (["a"], "metadata"),
    ],
)
def test_metadata_that_cannot_be_kept_is_refused(metadata: object, field: str) -> None:
    with open_engine(engine_config()) as engine:
        session = engine.open("a")
        with pytest.raises(InvalidRequest, match=field):
            session.turn("one", metadata=metadata)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match=field):
            engine.open("b", metadata=metadata)  # type: ignore[arg-type]
        assert session.info().turns == 0


@pytest.mark.parametrize(
    "beside",
    ['"metadata": 3', '"usage": []', f'"metadata": {{"a": {2**70}}}', '"usage": {"a": "\\ud83d"}'],
)
def test_imported_metadata_that_no_reply_can_carry_is_refused(beside: str) -> None:
    desk = ImportDesk(built.llama3())
    blob = f'{{"content": "x", {beside}}}'.encode()
    root = node(1, incoming_blob=b"{}", reply_blob=b"", tokenizer_digest="other")
    turn = node(2, 1, incoming_blob=b"", reply_blob=blob, sampling_blob=b"{}")
    with pytest.raises(InvalidRequest, match="metadata of turn 2"):
        desk.add(b"c", "local", wire.Import(id=1, nodes=(root, turn), commit=True))


def test_another_tenant_has_no_such_session(tmp_path: Path) -> None:
    with tenants(tmp_path, engine_config(blocks=128), access=access()) as (_, alice, bob):
        turn = alice.open("a").turn("one", sampling=SHORT, metadata=KEPT)
        more = alice.session("a").turn("more", sampling=SHORT)
        own = bob.open("b").turn("two", sampling=SHORT)
        with pytest.raises(SessionNotFound):
            bob.session("a").node()
        with pytest.raises(NodeNotFound):
            bob.session("b").node(more.node)
        assert own.node == turn.node  # ids count a tenant's own turns
        assert bob.session("b").node(own.node).metadata == {}
        assert alice.session("a").node(turn.node).metadata == KEPT
