"""Names longer than a database key, and odd ones, are kept apart and come back whole."""

from __future__ import annotations

from pathlib import Path

from sessionkv.store.directory import StoreDirectory
from sessionkv.store.journal import Journal
from sessionkv.types import DeleteHead, PutHead, PutKey, PutNode
from tests.builders.store import head, key, node

NAMES = [
    "a",
    "b" * 511,
    "b" * 512,
    "b" * 511 + "x",
    "b" * 511 + "y",
    "c" * 4000,
    "c" * 4000 + "d",
    "\U0001f600" * 300,
    "a/b/../c",
    "nul\x00inside",
]


def test_every_name_is_its_own(tmp_path: Path) -> None:
    with StoreDirectory.open(tmp_path / "store") as directory:
        journal = Journal(directory)
        journal.commit([[PutNode(node(1))]])
        journal.commit([[PutHead(head(name, 1)), PutKey(key(name))] for name in NAMES])
        journal.commit([[DeleteHead("local", "b" * 512), PutHead(head("a", 1, "other"))]])
        journal.close()
        journal = Journal(directory)
        state = journal.load()
        journal.close()
    expected = {("local", name) for name in NAMES if name != "b" * 512} | {("other", "a")}
    assert {(h.tenant, h.name) for h in state.heads} == expected
    assert {k.key for k in state.keys} == set(NAMES)
