from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sessionkv.errors import StoreError, StoreInUse, StoreUnavailable
from sessionkv.store.directory import StoreDirectory


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_makes_a_private_directory_with_format_and_lock(tmp_path: Path) -> None:
    with StoreDirectory.open(tmp_path / "a" / "store") as directory:
        assert directory.path == tmp_path / "a" / "store"
        assert [mode(directory.path), mode(directory.journal_path)] == [0o700, 0o700]
        assert [mode(directory.path / name) for name in ("lock", "format")] == [0o600, 0o600]
        assert (directory.path / "format").read_text() == "sessionkv-store 3\n"
        assert (directory.path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_second_open_is_refused_and_possible_after_close(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "store")
    first = StoreDirectory.open(tmp_path / "store")
    for spelling in ("store", "link", "x/../store"):
        with pytest.raises(StoreInUse) as caught:
            StoreDirectory.open(tmp_path / spelling)
        assert caught.value.details == {
            "directory": str(tmp_path / "store"),
            "pid": os.getpid(),
        }
        assert str(tmp_path / "store") in caught.value.message
    first.close()
    first.close()
    with pytest.raises(StoreError, match="closed"):
        first.check_process()
    StoreDirectory.open(tmp_path / "link").close()


def test_the_lock_goes_with_a_killed_process(tmp_path: Path) -> None:
    code = (
        "import sys, time; from sessionkv.store.directory import StoreDirectory as S\n"
        "s = S.open(sys.argv[1]); print('ready', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "store")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        with pytest.raises(StoreInUse) as caught:
            StoreDirectory.open(tmp_path / "store")
        assert caught.value.details["pid"] == child.pid
        child.send_signal(signal.SIGKILL)
        child.wait()
    StoreDirectory.open(tmp_path / "store").close()


def test_a_fork_may_not_use_it_and_does_not_keep_the_lock(tmp_path: Path) -> None:
    directory = StoreDirectory.open(tmp_path / "store")
    read, write = os.pipe()
    release_read, release_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            directory.check_process()
        except StoreError as error:
            os.write(write, error.code.encode())
        os.read(release_read, 1)
        os._exit(0)
    try:
        assert os.read(read, 100) == b"store"
        directory.check_process()
        directory.close()
        StoreDirectory.open(tmp_path / "store").close()  # while the child lives
    finally:
        os.write(release_write, b"x")
        assert os.waitpid(pid, 0)[1] == 0
        for fd in (read, write, release_read, release_write):
            os.close(fd)


def test_a_newer_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "format").write_text("sessionkv-store 4\n")
    with pytest.raises(StoreUnavailable, match=r"format 4.*upgrade sessionkv or choose another"):
        StoreDirectory.open(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["format", "lock"]
    (tmp_path / "format").write_text("sessionkv-store 1\n")
    StoreDirectory.open(tmp_path).close()


def test_a_directory_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(StoreUnavailable, match="not a sessionkv store"):
        StoreDirectory.open(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(StoreUnavailable, match="cannot be used"):
        StoreDirectory.open(tmp_path / "thesis.tex")


def test_a_store_in_an_empty_folder_is_closed_to_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    StoreDirectory.open(tmp_path).close()
    assert tmp_path.stat().st_mode & 0o777 == 0o700
    tmp_path.chmod(0o750)  # meant so by whoever did it later
    StoreDirectory.open(tmp_path).close()
    assert tmp_path.stat().st_mode & 0o777 == 0o750


def test_a_file_is_no_store_and_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text("mine")
    with pytest.raises(StoreUnavailable, match=r"README\.md is a file, not a directory$"):
        StoreDirectory.open(file)
    assert file.read_text() == "mine"
