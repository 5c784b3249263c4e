"""What the journal answers without reading everything, after changes, restarts and damage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from sessionkv.store.directory import StoreDirectory
from sessionkv.store.journal import Journal, name_key
from sessionkv.store.journal_records import node_key, sealed
from sessionkv.store.journal_tables import NUM_DATABASES
from sessionkv.store.questions import Due, FindDue, FindKey, FindSession, ListSessions, SessionPage
from sessionkv.types import (
    DeleteHead,
    DeleteNode,
    DropSession,
    ForgetKeys,
    JournalSummary,
    KeepIds,
    PutHead,
    PutKey,
    PutNode,
    StoredSession,
    TenantSessions,
)
from sessionkv.types.node_ids import first_of, row_for, row_of
from tests.builders.store import head, key, node


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[StoreDirectory]:
    with StoreDirectory.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def journal(directory: StoreDirectory) -> Iterator[Journal]:
    opened = Journal(directory)
    yield opened
    opened.close()


def find(journal: Journal, name: str) -> StoredSession | None:
    found = journal.answer(FindSession("local", name))
    assert found is None or isinstance(found, StoredSession)
    return found


def counts(journal: Journal, name: str) -> list[tuple[int, int, int]]:
    """(node, heads on it, nodes after it) from the root down."""
    found = find(journal, name)
    assert found is not None
    return [(n.record.node_id, n.heads, n.children) for n in found.nodes]


def names(journal: Journal, **asked: object) -> tuple[list[str], str | None]:
    page = journal.answer(ListSessions("local", **asked))  # type: ignore[arg-type]
    assert isinstance(page, SessionPage)
    return [row.head.name for row in page.rows], page.after


def unpinned(name: str, node_id: int, *, updated_s: float = 2.0, tenant: str = "local"):
    return replace(head(name, node_id, tenant), pin_tier="", updated_s=updated_s)


def damage(directory: StoreDirectory, database: bytes, at: bytes) -> None:
    """Flip a bit of one row."""
    path = str(directory.journal_path)
    with lmdb.open(path, max_dbs=NUM_DATABASES) as env, env.begin(write=True) as txn:
        opened = env.open_db(database, txn=txn)
        value = bytearray(txn.get(at, db=opened))
        value[-1] ^= 1
        txn.put(at, bytes(value), db=opened)


def test_a_session_comes_with_its_chain_and_who_else_is_on_it(journal: Journal) -> None:
    journal.commit([[PutNode(node(1)), PutHead(unpinned("a", 1))]])
    journal.commit([[PutNode(node(2, 1)), PutHead(unpinned("a", 2))]])
    journal.commit([[PutHead(unpinned("b", 2))]])
    journal.commit([[PutNode(node(3, 2)), PutHead(unpinned("b", 3))]])
    assert counts(journal, "a") == [(1, 0, 1), (2, 1, 1)]
    assert counts(journal, "b") == [(1, 0, 1), (2, 1, 1), (3, 1, 0)]
    found = find(journal, "b")
    assert found is not None
    assert found.head == unpinned("b", 3)
    assert [n.record for n in found.nodes] == [node(1), node(2, 1), node(3, 2)]
    journal.commit([[DeleteHead("local", "b"), DeleteNode(3)]])
    assert find(journal, "b") is None
    assert counts(journal, "a") == [(1, 0, 1), (2, 1, 0)]
    journal.commit([[PutHead(unpinned("a", 1)), DeleteNode(2)]])
    assert counts(journal, "a") == [(1, 1, 0)]
    assert find(journal, "nobody") is None
    assert journal.answer(FindSession("other", "a")) is None


def test_the_summary_counts_and_names_what_is_pinned(journal: Journal) -> None:
    assert journal.summary() == JournalSummary((), 1, (), 0)
    journal.commit([[PutNode(node(1)), PutHead(head("a", 1)), PutHead(unpinned("b", 1))]])
    journal.commit([[PutHead(unpinned("~n-1.2", 1)), KeepIds(9)]])
    assert journal.summary() == JournalSummary(
        (TenantSessions("local", 2, 1),), 9, (("local", "a"),), 3
    )
    journal.commit([[PutHead(unpinned("a", 1)), PutHead(head("b", 1)), KeepIds(4)]])
    assert journal.summary() == JournalSummary(
        (TenantSessions("local", 2, 1),), 9, (("local", "b"),), 3
    )
    journal.commit([[DeleteHead("local", "b"), DeleteHead("local", "~n-1.2")]])
    assert journal.summary() == JournalSummary((TenantSessions("local", 1, 0),), 9, (), 1)


def test_lists_are_by_name_in_pages(journal: Journal) -> None:
    long = ["m" * 400 + end for end in ("", "a", "b" * 3000, "b" * 3000 + "c")]
    wanted = sorted(["a", "b", "trip", "trip-2", "trip-10", "é", "\U0001f600", *long])
    journal.commit([[PutNode(node(1)), PutNode(node(2, 1))]])
    journal.commit([[PutHead(unpinned(name, 2)) for name in reversed(wanted)]])
    journal.commit([[PutHead(unpinned("a0", 1, tenant="other")), PutHead(unpinned("~n-1.7", 1))]])
    assert names(journal) == (wanted, None)
    for limit in (1, 2, 3, len(wanted)):
        found: list[str] = []
        after: str | None = None
        while True:
            page, after = names(journal, limit=limit, after=after)
            found += page
            if after is None:
                break
            assert (len(page), page[-1]) == (limit, after)
        assert found == wanted
    assert names(journal, prefix="trip", limit=2) == (["trip", "trip-10"], "trip-10")
    assert names(journal, prefix="trip", limit=2, after="trip-10") == (["trip-2"], None)
    assert names(journal, prefix="m" * 400 + "b") == (long[2:], None)
    assert names(journal, prefix="m" * 500) == ([], None)
    assert names(journal, prefix="\ud83d") == ([], None)
    assert names(journal, prefix="~") == (["~n-1.7"], None)
    page = journal.answer(ListSessions("local", limit=1))
    assert isinstance(page, SessionPage)
    row = page.rows[0]
    assert (row.head.name, row.kind, row.num_turns, row.num_tokens) == ("a", "chat", 1, 4)


def test_unnamed_heads_are_due_by_age_and_by_number(journal: Journal) -> None:
    journal.commit([[PutNode(node(1))]])
    for i in range(5):
        journal.commit([[PutHead(unpinned(f"~n-1.{i}", 1, updated_s=10.0 + i))]])
    journal.commit([[PutHead(unpinned("~n-1.0", 1, updated_s=20.0))]])  # used again

    def due(until_s: float, keep: int, limit: int = 9) -> list[str]:
        found = journal.answer(FindDue(until_s, keep, 0.0, 9, limit))
        assert isinstance(found, Due)
        assert not found.keys
        return [name.removeprefix("~n-1.") for _, name in found.heads]

    assert due(0.0, 9) == []
    assert due(12.0, 9) == ["1", "2"]
    assert due(0.0, 2) == ["1", "2", "3"]
    assert due(99.0, 9, limit=2) == ["1", "2"]
    assert due(99.0, 9) == ["1", "2", "3", "4", "0"]


def test_keys_are_found_replaced_and_forgotten_oldest_first(journal: Journal) -> None:
    records = [replace(key(f"k{i}"), created_s=float(i)) for i in range(6)]
    journal.commit([[PutKey(record) for record in reversed(records)]])
    assert journal.answer(FindKey("local", "k3")) == records[3]
    assert journal.answer(FindKey("other", "k3")) is None
    again = replace(records[0], created_s=9.0, response_blob=b"other")
    journal.commit([[PutKey(again)]])
    assert journal.answer(FindKey("local", "k0")) == again
    journal.commit([[ForgetKeys(1.5, 99)]])
    assert [k.key for k in journal.load().keys if k.created_s < 2] == []
    assert len(journal.load().keys) == 5
    journal.commit([[ForgetKeys(0.0, 2)]])
    assert sorted(k.key for k in journal.load().keys) == ["k0", "k5"]
    due = FindDue(0.0, 9, 5.0, 9, 9)
    assert journal.answer(due) == Due((), True)
    assert journal.answer(replace(due, keys_until_s=4.0)) == Due((), False)
    assert journal.answer(replace(due, keys_until_s=4.0, keep_keys=1)) == Due((), True)


def test_what_is_too_much_is_taken_from_the_tenant_that_has_most(journal: Journal) -> None:
    journal.commit([[PutNode(node(1))]])
    made = [("victim", 0.0), ("victim", 1.0), *(("flood", 10.0 + i) for i in range(6)), ("c", 2.0)]
    for tenant, at in made:
        unnamed = replace(unpinned(f"~{at:02}", 1, updated_s=at), tenant=tenant)
        answer = replace(key(f"k{at:02}"), tenant=tenant, created_s=at)
        journal.commit([[PutHead(unnamed), PutKey(answer)]])
    assert sorted(journal.summary().tenants, key=str) == [
        TenantSessions("c", 0, 1),
        TenantSessions("flood", 0, 6),
        TenantSessions("victim", 0, 2),
    ]
    due = FindDue(-1.0, 6, -1.0, 99, 9)
    floods = [("flood", f"~1{i}.0") for i in range(4)]
    assert journal.answer(due) == Due(tuple(floods[:3]), keys=False)
    assert journal.answer(replace(due, limit=2)) == Due(tuple(floods[:2]), keys=False)
    # What ran out goes first, whoever has it, and counts.
    found = journal.answer(replace(due, unnamed_until_s=0.5))
    assert found == Due((("victim", "~0.0"), *floods[:2]), keys=False)
    journal.commit([[ForgetKeys(-1.0, 5)]])
    kept = {(record.tenant, record.created_s) for record in journal.load().keys}
    assert kept == {(tenant, at) for tenant, at in made if tenant != "flood" or at >= 14.0}
    journal.commit([[ForgetKeys(1.0, 5)]])
    assert len(journal.load().keys) == 3
    journal.commit([[DeleteHead("c", "~2.0"), DropSession("flood", "~10.0")]])
    assert {of.tenant: of.num_unnamed for of in journal.summary().tenants} == {
        "flood": 5,
        "victim": 2,
    }


@pytest.mark.parametrize("database", [b"nodes", b"places", b"heads"])
def test_damage_is_told_of_its_session_alone_and_counted_once(
    directory: StoreDirectory, database: bytes
) -> None:
    journal = Journal(directory)
    journal.commit([[PutNode(n) for n in (node(1), node(2, 1), node(3, 2), node(4, 1))]])
    journal.commit([[PutHead(unpinned("broken", 3)), PutHead(unpinned("whole", 4))]])
    journal.close()
    damage(
        directory, database, name_key("local", "broken") if database == b"heads" else node_key(2)
    )
    journal = Journal(directory)
    whole = find(journal, "whole")
    assert whole is not None
    assert whole.damage == ""
    broken = find(journal, "broken")
    assert broken is not None
    assert find(journal, "broken") == broken
    assert journal.figures().damaged_records == 1
    if database == b"places":
        # Whatever can be read is served; what cannot be counted is never freed.
        assert [n.record for n in broken.nodes] == [node(1), node(2, 1), node(3, 2)]
        assert broken.nodes[1].children > 10**6
    else:
        assert (broken.nodes, bool(broken.damage)) == ((), True)
        journal.commit([[DropSession("local", "broken")]])
        assert find(journal, "broken") is None
        assert names(journal) == (["whole"], None)
    if database == b"nodes":
        # The unreadable turn and the one below it went, what the other session needs stayed.
        assert [n.node_id for n in journal.load().nodes] == [1, 4]
        assert counts(journal, "whole") == [(1, 0, 1), (4, 1, 0)]
    journal.close()


def test_each_row_of_ids_has_its_counter(directory: StoreDirectory) -> None:
    journal, row = Journal(directory), first_of(row_for("a"))
    assert journal.summary().other_next_ids == ()
    journal.commit([[PutNode(node(1)), PutNode(node(row + 1)), KeepIds(row + 9), KeepIds(7)]])
    journal.commit([[PutNode(node(row + 4)), PutNode(node(first_of(row_of(row) + 1) + 5))]])
    journal.close()
    damage(directory, b"meta", b"next_node_id" + row_of(row).to_bytes(3, "big"))
    journal = Journal(directory)
    found = journal.summary()
    assert (found.next_node_id, found.first_number) == (7, 1)
    # Where a counter cannot be read the row's last turn tells.
    assert found.other_next_ids == (row + 5, first_of(row_of(row) + 1) + 6)
    assert find(journal, "nobody") is None
    journal.close()


def test_rows_begin_above_the_ids_of_an_older_format(directory: StoreDirectory) -> None:
    journal = Journal(directory)
    journal.commit([[PutNode(node(1)), PutNode(node(2, 1)), PutHead(unpinned("b", 2))]])
    journal.close()
    as_format(directory, 2)
    journal = Journal(directory)
    journal.commit([[PutNode(node(3, 2)), PutHead(unpinned("b", 3))]])
    journal.close()
    journal = Journal(directory)
    assert (journal.summary().next_node_id, journal.summary().first_number) == (4, 3)
    journal.close()


@pytest.mark.parametrize("version", [1, 2])
def test_a_journal_of_an_older_format_gets_its_indexes(
    directory: StoreDirectory, version: int
) -> None:
    journal = Journal(directory)
    nodes = [node(1), node(2, 1), node(3, 2), node(4, 1), node(5), node(6, 5)]
    journal.commit([[PutNode(n) for n in nodes]])
    journal.commit([[PutHead(head("a", 3)), PutHead(unpinned("b", 2)), PutKey(key("k"))]])
    journal.commit([[PutHead(unpinned("~n-1.7", 4, updated_s=5.0))]])
    before = journal.load()
    answers = [
        replace(journal.summary(), first_number=7),
        *(find(journal, name) for name in ("a", "b", "~n-1.7")),
        names(journal),
        journal.answer(FindDue(9.0, 9, 9.0, 9, 9)),
    ]
    journal.close()
    as_format(directory, version)
    (directory.path / "format").write_text(f"sessionkv-store {version}\n")
    directory.close()
    with StoreDirectory.open(directory.path) as again:
        assert (again.path / "format").read_text() == "sessionkv-store 3\n"
        journal = Journal(again)
        assert answers == [
            journal.summary(),
            *(find(journal, name) for name in ("a", "b", "~n-1.7")),
            names(journal),
            journal.answer(FindDue(9.0, 9, 9.0, 9, 9)),
        ]
        # What no session reaches is left behind.
        assert journal.load() == replace(before, nodes=tuple(nodes[:4]))
        journal.close()


def as_format(directory: StoreDirectory, version: int) -> None:
    """Take away what an older format did not have; in format 2 rows by time had no tenant."""
    path = str(directory.journal_path)
    with lmdb.open(path, max_dbs=NUM_DATABASES) as env:
        by_time = [env.open_db(name) for name in (b"unnamed", b"ages")]
        others = [env.open_db(name) for name in (b"places", b"pins")]
        names = env.open_db(b"names", dupsort=True, dupfixed=True)
        tenants, meta = env.open_db(b"tenants"), env.open_db(b"meta")
        with env.begin(write=True) as txn:
            rows = [[bytes(row) for row, _ in txn.cursor(database)] for database in by_time]
            for database in (*by_time, tenants, *((*others, names) if version == 1 else ())):
                txn.drop(database, delete=version == 1 or database is tenants)
            assert txn.delete(b"version", db=meta)
            assert txn.delete(b"first_number", db=meta)
            for database, old in zip(by_time, rows, strict=True):
                for row in old if version == 2 else ():
                    txn.put(row[16:], b"", db=database)
            if version == 2:
                txn.put(b"version", sealed([2]), db=meta)
