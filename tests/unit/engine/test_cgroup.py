from __future__ import annotations

from pathlib import Path

import pytest

from sessionkv.engine.sizing import cgroup_bytes_left


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    inner = tmp_path / "root" / "outer" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "own").write_text("0::/outer/inner\n")
    return tmp_path


def limit(folder: Path, most: str, used: int) -> None:
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")


def left(groups: Path) -> int | None:
    return cgroup_bytes_left(groups / "own", groups / "root")


def test_the_tightest_of_all_groups_counts(groups: Path) -> None:
    limit(groups / "root" / "outer", "1000", 400)
    limit(groups / "root" / "outer" / "inner", "max", 300)
    assert left(groups) == 600
    limit(groups / "root" / "outer" / "inner", "500", 300)
    assert left(groups) == 200


def test_one_that_is_over_its_limit_leaves_nothing(groups: Path) -> None:
    limit(groups / "root" / "outer", "100", 101)
    assert left(groups) == 0


def test_without_limits_or_groups_there_is_no_answer(groups: Path) -> None:
    assert left(groups) is None
    (groups / "own").write_text("12:memory:/old\n")
    assert left(groups) is None
    (groups / "own").unlink()
    assert left(groups) is None
