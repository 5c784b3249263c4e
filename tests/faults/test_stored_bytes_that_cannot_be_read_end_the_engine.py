"""Fault: bytes of one turn that are no messages, imported or stored, bring down the whole engine.

They are refused on the way in, by a running engine and into a stopped store alike; and where a
store has them already, they cost the call that needs them and nothing else, restart or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from sessionkv.cli.main import main
from sessionkv.client.portable import export_trees, import_tree
from sessionkv.config import LimitsConfig
from sessionkv.engine.stopped_sessions import open_sessions
from sessionkv.errors import InvalidRequest, SessionDamaged
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.export_file import ExportWriter
from sessionkv.store.journal import Journal
from sessionkv.types import (
    DeleteHead,
    DeleteNode,
    JournalOp,
    NodeRecord,
    PutHead,
    PutKey,
    PutNode,
)
from sessionkv.types.portable import PortableSession
from sessionkv.types.portable_tree import PortableTree
from tests.builders.engine import engine_config, greedy, open_engine, socket_engine

SHORT = greedy(4)
BAD = [b"\xff", b"5", b"[" * 100_000, b"[1]"]
BLOBS = ["incoming_blob", "reply_blob"]


def raw_session(store: Path) -> tuple[list[NodeRecord], PortableSession]:
    with open_engine(engine_config(store)) as engine:
        engine.open("raw").turn(tokens=[1, 2, 3], sampling=SHORT)
        *nodes, session = export_trees(engine, ["raw"])
    assert isinstance(session, PortableSession)
    return [node for node in nodes if isinstance(node, NodeRecord)], session


def damaged(nodes: list[NodeRecord], blob: str, content: bytes) -> list[NodeRecord]:
    return [*nodes[:-1], replace(nodes[-1], **{blob: content})]  # type: ignore[arg-type]


def spoil(store: Path, blobs: Mapping[str, bytes], kinds: Iterable[str]) -> None:
    """Write such bytes into the journal itself, as an earlier version took them in."""
    directory = StoreDirectory.open(store)
    journal = Journal(directory)
    state = journal.load()
    turns = [replace(n, **blobs) if n.kind in kinds else n for n in state.nodes]  # type: ignore[arg-type]
    ops: list[JournalOp] = [DeleteHead(head.tenant, head.name) for head in state.heads]
    ops += [DeleteNode(node.node_id) for node in reversed(state.nodes)]  # each is written once
    ops += [*map(PutNode, turns), *map(PutHead, state.heads)]
    for key in state.keys:
        ops.append(PutKey(replace(key, response_blob=blobs["reply_blob"])))
    journal.commit([ops])
    journal.close()
    directory.close()


@pytest.mark.parametrize("blob", BLOBS)
def test_a_running_engine_refuses_them(tmp_path: Path, blob: str) -> None:
    nodes, session = raw_session(tmp_path / "a")
    with open_engine(engine_config(tmp_path / "b")) as engine:
        for content in BAD:
            with pytest.raises(InvalidRequest, match=r"of turn \d+ cannot be read"):
                import_tree(engine, PortableTree.of(damaged(nodes, blob, content), [session]))
        assert engine.sessions() == []


@pytest.mark.parametrize("blob", BLOBS)
def test_a_stopped_store_refuses_them(tmp_path: Path, blob: str) -> None:
    nodes, session = raw_session(tmp_path / "a")
    with StoreDirectory.open(tmp_path / "a") as directory, open_sessions(directory) as sessions:
        for content in BAD:
            bad = PortableTree.of(damaged(nodes, blob, content), [replace(session, name="bad")])
            with pytest.raises(InvalidRequest, match=r"of turn \d+ cannot be read"):
                sessions.add(bad, LimitsConfig())
        assert list(sessions.heads) == ["raw"]


def test_a_checksummed_file_with_them_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes, session = raw_session(tmp_path / "a")
    with (tmp_path / "bad.skv").open("wb") as file:
        writer = ExportWriter(file)
        for item in (*damaged(nodes, "incoming_blob", b"\xff"), session):
            writer.add(item)
        writer.finish()
    assert main(["sessions", "import", str(tmp_path / "bad.skv"), "--store", str(tmp_path / "b")])
    assert "cannot be read" in capsys.readouterr().err
    with StoreDirectory.open(tmp_path / "b") as directory, open_sessions(directory) as sessions:
        assert not sessions.heads


@pytest.mark.parametrize("content", BAD)
def test_stored_ones_cost_one_call_and_not_the_engine(tmp_path: Path, content: bytes) -> None:
    keyed = {"sampling": SHORT, "idempotency_key": "k"}
    config = engine_config(tmp_path / "a")
    with open_engine(config) as engine:
        engine.open("raw").turn(tokens=[1, 2, 3], **keyed)
        engine.open("chat", history="follow").turn("hello", sampling=SHORT)
    blobs = dict.fromkeys(BLOBS, content)
    spoil(tmp_path / "a", blobs, ("chat", "raw"))
    (tmp_path / "s").mkdir()
    for _ in range(2):  # a restart changes nothing
        with socket_engine(tmp_path / "s", config) as engine, engine.client() as client:
            victim = client.open("victim").stream(tokens=[5], sampling=greedy(40))
            for name in ("raw", "chat"):
                with pytest.raises(SessionDamaged, match=r"turn \d+ cannot be read"):
                    client.session(name).info(history=True)
            with pytest.raises(SessionDamaged, match=r"turn \d+ cannot be read"):
                client.session("chat").turn("hello again", sampling=SHORT)
            with pytest.raises(SessionDamaged, match="under the idempotency key"):
                client.session("raw").turn(tokens=[1, 2, 3], **keyed)
            assert client.session("raw").info().turns == 1
            assert sum(len(event.tokens) for event in victim) == 40
            client.delete("victim")


@pytest.mark.parametrize("content", [*BAD, b'{"system":5}', b'{"tools":"[5]"}'])
def test_a_root_that_cannot_be_read_costs_its_sessions_turn(tmp_path: Path, content: bytes) -> None:
    config = engine_config(tmp_path / "a")
    with open_engine(config) as engine:
        engine.open("a", system="Be brief.")
    spoil(tmp_path / "a", {"incoming_blob": content}, ("root",))
    with open_engine(config) as engine:
        with pytest.raises(SessionDamaged, match=r"turn \d+ cannot be read"):
            engine.session("a").turn("x", sampling=SHORT)
        with pytest.raises(SessionDamaged, match=r"turn \d+ cannot be read"):
            engine.session("a").info(history=True)
        assert engine.open("b").turn("x", sampling=SHORT).tokens
