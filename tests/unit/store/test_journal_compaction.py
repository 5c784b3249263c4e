"""The journal's file shrinks while it is in use, and nothing is lost on the way."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from sessionkv.store.directory import StoreDirectory
from sessionkv.store.journal import Journal
from sessionkv.store.journal_copy import JournalCopy
from sessionkv.store.worker import StoreWorker
from sessionkv.types import DeleteNode, JournalState, PutHead, PutNode
from tests.builders.store import Gates, head, node

BIG = bytes(60_000)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[StoreDirectory]:
    with StoreDirectory.open(tmp_path / "store") as opened:
        yield opened


def wasteful(directory: StoreDirectory, *, keep: int = 3) -> Journal:
    """A journal of which most pages were used and are free again."""
    journal = Journal(directory, compact_bytes=2**20)
    journal.commit([[PutNode(node(i, reply_blob=BIG)) for i in range(1, 61)]])
    journal.commit([[DeleteNode(i) for i in range(keep + 1, 61)]])
    journal.commit([[PutHead(head(f"s{i}", i)) for i in range(1, keep + 1)]])
    return journal


def size(directory: StoreDirectory) -> int:
    return (directory.journal_path / "data.mdb").stat().st_size


def finish(journal: Journal) -> bool:
    assert journal._copy is not None
    assert journal._copy.end(30)
    assert journal.is_copied
    caught_up = journal.catch_up()
    journal.swap()
    return caught_up


def test_a_copy_takes_the_place_of_a_file_that_is_mostly_empty(directory: StoreDirectory) -> None:
    journal = wasteful(directory)
    before, was = journal.load(), size(directory)
    assert journal.wasted_bytes() > 3_000_000
    journal.compact_if_worth()
    # Committed while the copy is made, or after.
    journal.commit([[PutNode(node(61, 1)), PutHead(head("s1", 61))]])
    journal.commit([[DeleteNode(3), PutHead(head("s3", 2))]])
    expected = journal.load()
    assert finish(journal)
    assert journal.load() == expected
    assert expected != before
    assert size(directory) < was / 4
    assert journal.wasted_bytes() < 2**20
    assert not (directory.journal_path / "copy").exists()
    assert (directory.journal_path / "data.mdb").stat().st_mode & 0o777 == 0o600
    journal.commit([[PutNode(node(62, 61))]])
    journal.close()
    journal = Journal(directory)
    assert [n.node_id for n in journal.load().nodes] == [1, 2, 61, 62]
    assert journal.figures().compactions == 0
    journal.close()


def test_a_file_in_use_is_left_alone(directory: StoreDirectory) -> None:
    journal = wasteful(directory, keep=40)
    journal.compact_if_worth()
    assert not journal.is_compacting
    journal.close()


def test_the_journal_may_be_closed_with_a_copy_under_way(directory: StoreDirectory) -> None:
    journal = wasteful(directory)
    expected = journal.load()
    journal.compact_if_worth()
    assert journal.is_compacting
    journal.close()
    assert not (directory.journal_path / "copy").exists()
    journal = Journal(directory)
    assert journal.load() == expected
    journal.close()


@pytest.mark.parametrize("content", [b"", b"half"])
def test_a_copy_left_by_a_killed_engine_is_thrown_away(
    directory: StoreDirectory, content: bytes
) -> None:
    journal = wasteful(directory)
    expected = journal.load()
    journal.close()
    (directory.journal_path / "copy").mkdir()
    (directory.journal_path / "copy" / "data.mdb").write_bytes(content)
    journal = Journal(directory)
    assert journal.load() == expected
    assert not (directory.journal_path / "copy").exists()
    journal.close()


def test_a_copy_that_cannot_be_made_changes_nothing(
    directory: StoreDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    journal = wasteful(directory)
    expected = journal.load()
    (directory.journal_path / "copy").write_text("in the way")
    journal.compact_if_worth()
    assert not journal.is_compacting
    assert "could not be compacted" in caplog.text
    (directory.journal_path / "copy").unlink()
    journal.compact_if_worth()  # not again before twice as much is wasted
    assert not journal.is_compacting
    assert journal.load() == expected
    journal.close()


def test_a_copy_that_lags_too_far_is_given_up(
    directory: StoreDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = wasteful(directory)
    journal.compact_if_worth()
    monkeypatch.setattr("sessionkv.store.journal_copy.MAX_CHANGES", 3)
    journal.commit([[PutHead(head(f"t{i}", 1)) for i in range(4)]])
    expected = journal.load()
    assert not finish(journal)
    assert journal.load() == expected
    journal.close()


def test_the_thread_compacts_between_commits(directory: StoreDirectory) -> None:
    """Commits go on while the copy stands before its last step, and after it."""
    journal = wasteful(directory)
    answers: SimpleQueue[Any] = SimpleQueue()
    gates = Gates("before_swap", "after_swap")
    worker = StoreWorker(journal, None, answers, gates=gates)
    was = size(directory)
    tickets = iter(range(1000))

    def commit(node_id: int) -> None:
        worker.commit(next(tickets), [PutNode(node(node_id, 1)), PutHead(head("s1", node_id))])

    for node_id in range(61, 65):
        commit(node_id)
    assert gates.reached["before_swap"].wait(30)
    for node_id in range(65, 70):
        commit(node_id)
    gates.open("before_swap")
    assert gates.reached["after_swap"].wait(30)
    commit(70)
    gates.open("after_swap")
    done = [answers.get(timeout=30) for _ in range(10)]
    assert [(a.ticket, a.error) for a in done] == [(i, None) for i in range(10)]
    worker.close(10)
    assert size(directory) < was / 4
    journal = Journal(directory)
    state: JournalState = journal.load()
    assert [n.node_id for n in state.nodes] == [1, 2, 3, *range(61, 71)]
    journal.close()


def test_the_map_grows_when_the_copy_has_been_read(
    directory: StoreDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(directory, compact_bytes=2**20, map_bytes=2**23)
    journal.commit([[PutNode(node(i, reply_blob=BIG)) for i in range(1, 61)]])
    journal.commit([[DeleteNode(i) for i in range(4, 61)]])
    may_read = threading.Event()
    begin, end = os.open, JournalCopy.end
    sizes = []

    def held(path: Path, *arguments: Any, **options: Any) -> int:
        if Path(path).parent.name == "copy":
            assert may_read.wait(30)
        return begin(path, *arguments, **options)

    def ending(copy: JournalCopy, timeout_s: float | None = None) -> bool:
        may_read.set()
        is_done = end(copy, timeout_s)
        sizes.append((is_done, journal._env.info()["map_size"]))
        return is_done

    monkeypatch.setattr(os, "open", held)
    monkeypatch.setattr(JournalCopy, "end", ending)
    journal.compact_if_worth()
    journal.commit([[PutNode(node(i, reply_blob=BIG)) for i in range(61, 261)]])
    assert sizes[0] == (True, 2**23)
    assert journal._env.info()["map_size"] > 2**23
    expected = journal.load()
    assert finish(journal)
    assert journal.load() == expected
    assert len(expected.nodes) == 203
    journal.close()
