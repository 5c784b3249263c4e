"""A change that a full disk does not take: retryable, said once, with the path and what to do."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from sessionkv.cli.hints import hint_for
from sessionkv.errors import StoreUnavailable, error_from_wire
from sessionkv.store import full_disk
from tests.builders.engine import engine_config, greedy, open_engine


def failing(code: int) -> lmdb.Error:
    made: lmdb.Error = type("Refused", (lmdb.Error,), {"code": code})("mdb_txn_commit: refused")
    return made


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_every_door_says_it_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise failing(code)

    # A short write, which is EIO here, is of a full disk where there is no room.
    monkeypatch.setattr(full_disk, "_NEARLY_FULL_BYTES", 2**62)
    config = engine_config(tmp_path / "store", disk_bytes=0)
    with open_engine(config) as engine:
        session = engine.open("a")
        acts: tuple[Callable[[], object], ...] = (
            lambda: engine.open("b"),
            lambda: session.turn("one", sampling=greedy(2)),
            lambda: session.close(keep=False),
        )
        for act in acts:
            with monkeypatch.context() as patch:
                patch.setattr("sessionkv.store.journal.write", refuse)
                with pytest.raises(StoreUnavailable) as caught:
                    act()
            error = caught.value
            assert error.retryable
            assert error.message.count("cannot be written") == 1
            assert "could not be written" not in error.message
            assert f"{tmp_path}/store/journal" in error.message
            assert "free space on its disk; the engine goes on by itself" in error.message
            assert hint_for(error) is None
        session.turn("one", sampling=greedy(2))
        assert [info.turns for info in engine.sessions()] == [1]


def test_a_disk_that_fails_is_not_taken_for_a_full_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_disk, "_NEARLY_FULL_BYTES", 0)
    error = full_disk.not_written("the journal", tmp_path, failing(errno.EIO))
    assert not error.retryable
    assert "free space" not in error.message


def test_retryable_crosses_the_wire_with_the_error() -> None:
    for retryable in (True, False):
        sent = StoreUnavailable("full", retryable=retryable, directory="d")
        found = error_from_wire(sent.to_wire())
        assert isinstance(found, StoreUnavailable)
        assert (found.retryable, found.details) == (retryable, {"directory": "d"})
        assert sent.copy().retryable is retryable
