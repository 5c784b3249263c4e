from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from sessionkv.model.files import make_folder_once, write_atomically
from sessionkv.model.progress import Progress, no_progress


def test_write_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_atomically(path, b"a longer text")
    write_atomically(path, b"short")
    assert path.read_bytes() == b"short"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def make(scratch: Path, lock: int) -> Path:
    del lock
    folder = scratch / "folder"
    folder.mkdir()
    (folder / "content").write_text(str(os.getpid()))
    return folder


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    target = tmp_path / "models" / "x"
    assert make_folder_once(target, tmp_path / "locks", make, progress=no_progress) == target

    def again(scratch: Path, lock: int) -> Path:
        raise AssertionError("made twice")

    assert make_folder_once(target, tmp_path / "locks", again, progress=no_progress) == target


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail(scratch: Path, lock: int) -> Path:
        (scratch / "half").write_text("half")
        raise ValueError("no")

    target = tmp_path / "models" / "x"
    with pytest.raises(ValueError, match="no"):
        make_folder_once(target, tmp_path / "locks", fail, progress=no_progress)
    assert list(target.parent.iterdir()) == []


def _maker(root: Path, pipe: Connection) -> None:
    """Child: tells when it is in the middle (or has to wait), goes on when told."""

    def gated(scratch: Path, lock: int) -> Path:
        pipe.send("making")
        pipe.recv()
        return make(scratch, lock)

    def waiting(event: Progress) -> None:
        pipe.send(event.stage)

    target = make_folder_once(root / "models" / "x", root / "locks", gated, progress=waiting)
    pipe.send((target / "content").read_text())


def _spawn(root: Path) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_maker, args=(root, there))
    child.start()
    there.close()
    return child, here


@pytest.mark.slow
def test_two_processes_at_once_make_it_once(tmp_path: Path) -> None:
    first, first_pipe = _spawn(tmp_path)
    assert first_pipe.recv() == "making"
    second, second_pipe = _spawn(tmp_path)
    assert second_pipe.recv() == "wait"
    first_pipe.send("go")
    assert first_pipe.recv() == second_pipe.recv() == str(first.pid)
    for child in (first, second):
        child.join()
        assert child.exitcode == 0
    first_pipe.close()
    second_pipe.close()


@pytest.mark.slow
def test_after_a_kill_in_the_middle_the_next_starts_over(tmp_path: Path) -> None:
    first, first_pipe = _spawn(tmp_path)
    assert first_pipe.recv() == "making"
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    left = list((tmp_path / "models").iterdir())
    assert [path.name.startswith(".tmp-x-") for path in left] == [True]
    target = make_folder_once(
        tmp_path / "models" / "x", tmp_path / "locks", make, progress=no_progress
    )
    assert (target / "content").read_text() == str(os.getpid())
    assert list(target.parent.iterdir()) == [target]
    first_pipe.close()
