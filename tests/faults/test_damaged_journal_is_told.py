"""A journal that cannot be read is set aside at start: whoever looks is told while it is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sessionkv.actor.host import CoreHost
from sessionkv.engine.build import build_engine
from sessionkv.engine.messages import CoreMessage
from tests.builders.engine import engine_config, greedy, open_engine


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """One session with one turn, in a journal that was overwritten."""
    path = tmp_path / "store"
    with open_engine(engine_config(path)) as engine:
        engine.open("a").turn("one", sampling=greedy(2))
    damage(path)
    return path


class Nowhere:
    """A front that nobody listens to."""

    def put(self, messages: list[CoreMessage]) -> None:
        """Take no notice."""


def damage(store: Path) -> None:
    (store / "journal" / "data.mdb").write_bytes(b"junk" * 4096)


def told(store: Path) -> dict[str, Any]:
    """What ``stats`` of an engine on the store says."""
    with open_engine(engine_config(store)) as engine:
        assert engine.sessions() == []
        found: dict[str, Any] = engine.stats()["store"]["set_aside_journals"]
    return found


def test_stats_name_every_journal_until_it_is_removed(store: Path) -> None:
    first = store / "journal.damaged-1"
    found = told(store)
    assert list(found) == [str(first)]
    assert found[str(first)].endswith("+00:00")
    assert told(store) == found  # at later starts too
    damage(store)
    both = told(store)
    assert list(both) == [str(first), str(store / "journal.damaged-2")]
    assert both[str(first)] == found[str(first)]
    shutil.rmtree(first)
    assert list(told(store)) == [str(store / "journal.damaged-2")]


def test_the_start_says_it_and_what_to_do(store: Path) -> None:
    with open_engine(engine_config(store)):
        pass
    config = engine_config(store)
    host = CoreHost(build_engine(config), config, Nowhere())
    try:
        (note,) = (note for note in host.report["notes"] if "DAMAGED JOURNAL" in note)
    finally:
        host.close()
    assert f"{store}/journal.damaged-1" in note
    assert "Restore the store from a backup" in note
    assert "remove it" in note


def test_verify_names_every_one(store: Path, run: Any) -> None:
    told(store)
    damage(store)
    told(store)
    code, out, _ = run("store", "verify", "--store", store, "--json")
    assert code == 1
    places = [problem["place"] for problem in json.loads(out)["problems"]]
    assert places == ["journal.damaged-1", "journal.damaged-2"]
    code, out, _ = run("store", "stats", "--store", store)
    assert code == 0
    assert "journal.damaged-2, set aside on" in " ".join(out.split())


def test_nothing_is_promised_of_a_journal_that_cannot_be_read(store: Path, run: Any) -> None:
    for argv in (
        ("store", "stats", "--store", store),
        ("sessions", "export", "--all", "-o", store.parent / "out.skv", "--store", store),
    ):
        code, _, err = run(*argv)
        text = " ".join(err.split())
        assert code == 1
        assert "is damaged" in text
        assert "Restore the store from a backup" in text
        assert "has room" not in text
    code, out, _ = run("store", "purge", "--store", store, "--yes")
    text = " ".join(out.split())
    assert code == 0
    assert "all sessions stay" not in text
    assert "the journal is damaged" in text
    assert (store / "journal" / "data.mdb").read_bytes() == b"junk" * 4096
