"""A journal opens without reading what is in it, however much that is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.store.filled_journal import fill, session_name
from sessionkv.store import journal_reads, journal_tables
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.journal import Journal
from sessionkv.store.questions import FindSession, ListSessions
from sessionkv.types import JournalSummary, PutHead, TenantSessions
from tests.builders.store import head


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Rows that were read, by kind."""
    counts: Counter[str] = Counter()

    def counting(name: str, unpack: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            counts[args[2].__name__ if name == "unpack" else "Place"] += 1
            return unpack(*args)

        return counted

    for module, name in ((journal_reads, "unpack"), (journal_tables, "unpack")):
        monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    places = counting("unpack_place", journal_tables.unpack_place)
    monkeypatch.setattr(journal_tables, "unpack_place", places)
    return counts


def test_what_is_read_does_not_grow_with_the_journal(tmp_path: Path, read: Counter[str]) -> None:
    with StoreDirectory.open(tmp_path / "store") as directory:
        filled = Journal(directory)
        fill(filled, 3000, turns=3, tokens=4)
        node_id = filled.summary().next_node_id - 1
        filled.commit([[PutHead(head("pinned", node_id))]])
        filled.close()
        read.clear()
        opened = Journal(directory)
        summary = opened.summary()
        assert summary == JournalSummary(
            (TenantSessions("local", 3001, 0),), 12_001, (("local", "pinned"),), 3001
        )
        assert read == {"HeadRecord": 1}
        read.clear()
        opened.answer(FindSession("local", session_name(1234)))
        assert read == {"HeadRecord": 1, "NodeRecord": 4, "Place": 4}
        read.clear()
        opened.answer(ListSessions("local", after=session_name(100), limit=10))
        assert read == {"HeadRecord": 12, "Place": 10}  # the one before and the one after
        opened.close()
