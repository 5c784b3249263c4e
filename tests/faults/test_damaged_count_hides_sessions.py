"""What tenants have is counted in rows of its own: where one is wrong no session is lost by it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from sessionkv.cache.turns import Opening
from sessionkv.errors import StoreError
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.journal import Journal
from sessionkv.store.journal_records import name_key, sealed, tenant_key
from sessionkv.store.journal_tables import NUM_DATABASES
from sessionkv.store.journal_tenants import unpack_tenant
from sessionkv.store.questions import FindSession
from sessionkv.store.verify import verify_store
from sessionkv.types import DropSession, ForgetKeys, PutHead, PutKey, PutNode, TenantSessions
from tests.builders.engine import engine_config, greedy, open_engine
from tests.builders.store import head, key, node
from tests.builders.tree import ROOT, TENANT, Sessions

OWNER = tenant_key("local")
COUNTS = {TenantSessions("local", 2, 1), TenantSessions("other", 1, 0)}

Harm = Callable[[lmdb.Transaction, lmdb._Database], object]


def flipped(txn: lmdb.Transaction, rows: lmdb._Database, at: int = -1) -> None:
    value = bytearray(txn.get(OWNER, db=rows))
    value[at] ^= 1
    txn.put(OWNER, bytes(value), db=rows)


def missing(txn: lmdb.Transaction, rows: lmdb._Database) -> None:
    assert txn.delete(OWNER, db=rows)


def wrong(named: int, unnamed: int, keys: int) -> Harm:
    """A row with such counts and the checksum of them."""
    value = sealed(["local", named, unnamed, keys])
    return lambda txn, rows: txn.put(OWNER, value, db=rows)


def of_another(txn: lmdb.Transaction, rows: lmdb._Database) -> None:
    """The row of a tenant under the key of one that there is not."""
    txn.put(tenant_key("nobody"), txn.pop(OWNER, db=rows), db=rows)


HARMS = {
    "a bit of the checksum": lambda txn, rows: flipped(txn, rows, 0),
    "a bit of the tenant": lambda txn, rows: flipped(txn, rows, 12),
    "a bit of a count": flipped,
    "no row": missing,
    "another key": of_another,
    "too few": wrong(0, 0, 0),
    "too many": wrong(7, 1, 1),
    "one taken for the other": wrong(1, 2, 1),
    "wrong keys": wrong(2, 1, 9),
}


def harm(directory: StoreDirectory, how: Harm, database: bytes = b"tenants") -> None:
    path = str(directory.journal_path)
    with lmdb.open(path, max_dbs=NUM_DATABASES) as env, env.begin(write=True) as txn:
        how(txn, env.open_db(database, txn=txn))


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[StoreDirectory]:
    """The store of two tenants."""
    with StoreDirectory.open(tmp_path / "store") as opened:
        journal = Journal(opened)
        unnamed = replace(head("~n-1.2", 1), pin_tier="")
        journal.commit([[PutNode(node(1)), PutHead(head("trip", 1)), PutHead(head("b", 1))]])
        journal.commit([[PutHead(unnamed), PutHead(head("c", 1, "other"))]])
        journal.commit([[PutKey(replace(key("k"), tenant="local", created_s=5.0))]])
        assert set(journal.summary().tenants) == COUNTS
        journal.close()
        yield opened


def num_keys(directory: StoreDirectory) -> int:
    counted = []

    def look(txn: lmdb.Transaction, rows: lmdb._Database) -> None:
        row = unpack_tenant(OWNER, bytes(txn.get(OWNER, db=rows)))
        assert row is not None
        counted.append(row.keys)

    harm(directory, look)
    return counted[0]


@pytest.mark.parametrize("how", HARMS.values(), ids=HARMS.keys())
def test_counts_are_made_anew_and_the_damage_is_told(
    directory: StoreDirectory, how: Harm, caplog: pytest.LogCaptureFixture
) -> None:
    harm(directory, how)
    with caplog.at_level(logging.WARNING):
        journal = Journal(directory)
    assert "no session is lost" in caplog.text
    summary = journal.summary()
    assert (set(summary.tenants), summary.num_sessions) == (COUNTS, 4)
    assert journal.answer(FindSession("local", "trip")) is not None
    assert journal.recounted == journal.figures().damaged_records == (2 if how is of_another else 1)
    journal.close()
    assert num_keys(directory) == 1
    caplog.clear()
    again = Journal(directory)
    assert (again.recounted, again.damaged_records, caplog.text) == (0, 0, "")
    assert set(again.summary().tenants) == COUNTS
    again.close()


@pytest.mark.parametrize("how", [flipped, missing, wrong(0, 0, 0)])
def test_what_was_there_is_resumed_by_an_engine(tmp_path: Path, how: Harm) -> None:
    config = engine_config(tmp_path / "store")
    with open_engine(config) as engine:
        engine.open("trip").turn("one", sampling=greedy(2))
    with StoreDirectory.open(tmp_path / "store") as directory:
        harm(directory, how)
    with open_engine(config) as engine:
        engine.open("trip")
        assert engine.session("trip").info().turns == 1
        assert [info.name for info in engine.sessions()] == ["trip"]
        assert engine.stats()["store"]["damaged_records"] == 1


def test_verify_names_it_once(directory: StoreDirectory) -> None:
    harm(directory, flipped)
    problems = verify_store(directory, progress=lambda *_: None).problems
    assert [problem.what for problem in problems if "counts" in problem.what] == [
        "the counts of 1 tenants were damaged; they were made anew"
    ]
    assert "counts" not in str(verify_store(directory, progress=lambda *_: None).problems)


def test_a_row_that_is_damaged_under_way_stays_so_until_it_is_counted(
    directory: StoreDirectory,
) -> None:
    journal = Journal(directory)
    with journal._env.begin(write=True) as txn:
        flipped(txn, journal._tables.tenants)
    journal.commit([[PutHead(head("d", 1)), ForgetKeys(9.0, 9)]])
    assert journal.summary().num_sessions == 5
    assert journal.damaged_records == 1
    journal.close()
    journal = Journal(directory)
    assert TenantSessions("local", 3, 1) in journal.summary().tenants
    journal.close()


def test_a_new_head_replaces_none(directory: StoreDirectory) -> None:
    """Also where who asks for it believes that there is none."""
    blind = Sessions().tree  # of an empty journal: it knows all there is
    journal = Journal(directory)
    before = journal.answer(FindSession("local", "trip"))
    change = blind.open(TENANT, "trip", root=ROOT, opening=Opening(), now=9.0)
    taken = [PutHead(replace(op.head, tenant="local")) for op in change.ops if type(op) is PutHead]
    (taken,) = (replace(op, is_new=True) for op in taken)
    assert any(type(op) is PutHead and op.is_new for op in change.ops)
    with pytest.raises(StoreError, match="'trip' is in the journal already"):
        journal.commit([[PutNode(node(2)), taken]])
    assert journal.answer(FindSession("local", "trip")) == before
    assert journal.figures().num_nodes == 1
    journal.close()


def test_sessions_that_cannot_be_read_are_counted_in_all(directory: StoreDirectory) -> None:
    """Neither the row of their tenant nor they themselves: whose they are nobody can say."""

    def all_of_local(txn: lmdb.Transaction, rows: lmdb._Database) -> None:
        for name in ("trip", "b", "~n-1.2"):
            value = bytearray(txn.get(name_key("local", name), db=rows))
            value[-1] ^= 1
            txn.put(name_key("local", name), bytes(value), db=rows)

    harm(directory, all_of_local, b"heads")
    journal = Journal(directory)  # the row still says whose they are
    assert set(journal.summary().tenants) == COUNTS
    journal.commit([[DropSession("local", "~n-1.2"), ForgetKeys(9.0, 9)]])
    journal.close()
    harm(directory, missing)
    journal = Journal(directory)
    summary = journal.summary()
    assert (summary.tenants, summary.num_sessions) == ((TenantSessions("other", 1, 0),), 3)
    found = journal.answer(FindSession("local", "trip"))
    assert found is not None
    assert found.damage == "its head"
    journal.close()
