"""Documents point at things that exist, and the package exports what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sessionkv

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
]
LINK = re.compile(r"\]\(([^)#\s]+)\)")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path: Path) -> None:
    targets = [target for target in LINK.findall(path.read_text()) if "://" not in target]
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_every_invariant_names_its_tests() -> None:
    rows = re.findall(
        r"^\| (I\d+) \|.*\| (.*) \|$", (ROOT / "docs/invariants.md").read_text(), re.M
    )
    assert [name for name, _ in rows] == [f"I{number}" for number in range(1, 16)]
    assert all(LINK.search(tests) for _, tests in rows)


def test_exports_are_importable_and_sorted() -> None:
    assert sessionkv.__all__ == sorted(sessionkv.__all__)
    for name in sessionkv.__all__:
        assert getattr(sessionkv, name) is not None
    assert set(dir(sessionkv)) >= set(sessionkv.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Enjine'"):
        _ = sessionkv.Enjine


def test_version_is_the_packages() -> None:
    assert f'version = "{sessionkv.__version__}"' in (ROOT / "pyproject.toml").read_text()
