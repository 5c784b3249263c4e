from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from sessionkv.errors import StoreError
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.journal import Journal, name_key
from sessionkv.types import (
    DeleteHead,
    DeleteKey,
    DeleteNode,
    JournalState,
    PutHead,
    PutKey,
    PutNode,
)
from tests.builders.store import head, key, node


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[StoreDirectory]:
    with StoreDirectory.open(tmp_path / "store") as opened:
        yield opened


def reopened(journal: Journal, directory: StoreDirectory) -> Journal:
    journal.close()
    return Journal(directory)


def test_an_empty_journal_starts_with_node_one(directory: StoreDirectory) -> None:
    journal = Journal(directory)
    assert journal.load() == JournalState((), (), (), 1)
    assert (journal.quarantined, journal.damaged_records) == (None, 0)
    journal.close()


def test_everything_comes_back_after_reopening(directory: StoreDirectory) -> None:
    journal = Journal(directory)
    journal.commit([[PutNode(node(1)), PutHead(head("a", 1))], [PutNode(node(2, 1))]])
    journal.commit([[PutHead(head("a", 2)), PutHead(head("b", 1)), PutKey(key("k"))]])
    journal = reopened(journal, directory)
    state = journal.load()
    assert state.nodes == (node(1), node(2, 1))
    assert sorted(state.heads, key=lambda h: h.name) == [head("a", 2), head("b", 1)]
    assert state.keys == (key("k"),)
    assert state.next_node_id == 3
    assert journal.used_bytes() > 0
    journal.close()


def test_deletes_and_ids_that_are_never_given_again(directory: StoreDirectory) -> None:
    journal = Journal(directory)
    journal.commit([[PutNode(node(1)), PutNode(node(7)), PutHead(head("a", 7)), PutKey(key("k"))]])
    journal.commit([[DeleteHead("local", "a"), DeleteNode(7), DeleteKey("local", "k")]])
    journal.commit([[DeleteHead("local", "a"), DeleteNode(7)]])  # gone already: no matter
    journal = reopened(journal, directory)
    assert journal.load() == JournalState((node(1),), (), (), 8)
    journal.close()


def test_a_commit_that_fails_changes_nothing(directory: StoreDirectory) -> None:
    journal = Journal(directory)
    journal.commit([[PutNode(node(1))]])
    with pytest.raises(StoreError, match="turn 1 is in the journal"):
        journal.commit([[PutHead(head("a", 1))], [PutNode(node(1))]])
    with pytest.raises(StoreError, match="cannot be stored"):
        journal.commit([[PutNode(node(2, 1)), PutHead(head("\ud83d", 1))]])
    assert journal.load() == JournalState((node(1),), (), (), 2)
    journal.close()


def test_the_map_grows_when_it_is_full(directory: StoreDirectory) -> None:
    journal = Journal(directory, map_bytes=64 * 1024)
    blob = bytes(50_000)
    for i in range(1, 41):
        journal.commit([[PutNode(node(i, i - 1 or None, reply_blob=blob))]])
    journal = reopened(journal, directory)
    assert [len(n.reply_blob) for n in journal.load().nodes] == [50_000] * 40
    journal.close()


def test_a_damaged_record_is_left_out_with_what_needs_it(directory: StoreDirectory) -> None:
    journal = Journal(directory)
    nodes = [node(1), node(2, 1), node(3, 2), node(4, 1)]
    journal.commit([[PutNode(n) for n in nodes]])
    journal.commit([[PutHead(head("broken", 3)), PutHead(head("whole", 4))]])
    journal.close()
    with lmdb.open(str(directory.journal_path), max_dbs=4) as env, env.begin(write=True) as txn:
        database = env.open_db(b"nodes", txn=txn)
        value = bytearray(txn.get((2).to_bytes(8, "big"), db=database))
        value[-1] ^= 1
        txn.put((2).to_bytes(8, "big"), bytes(value), db=database)
    journal = Journal(directory)
    state = journal.load()
    assert state.nodes == (nodes[0], nodes[3])
    assert state.heads == (head("whole", 4),)
    assert (journal.damaged_records, state.next_node_id) == (1, 5)
    journal.close()


def test_name_keys_are_fixed_in_length_and_framed() -> None:
    assert name_key("local", "trip").hex() == (
        "ceda559322f831375fe817568602ed33d11378b55dbb55dd1c9cd7b9e7293736"
    )
    names = ["a", "b" * 511, "b" * 512, "b" * 4096, "b" * 511 + "c", "\U0001f600", "a/b"]
    assert len({name_key("t", name) for name in names}) == len(names)
    assert {len(name_key("t", name)) for name in names} == {32}
    assert name_key("ab", "c") != name_key("a", "bc")
