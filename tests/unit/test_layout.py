"""The folder layout that packaging and the import rules rely on."""

from pathlib import Path

import pytest

import sessionkv.ipc.messages

ROOT = Path(__file__).parents[2]
LINKED = ("kernels", "ipc", "store")


@pytest.mark.parametrize("name", LINKED)
def test_linked_folder_is_a_relative_link_without_init(name: str) -> None:
    link = ROOT / "sessionkv" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"
    assert not (ROOT / name / "__init__.py").exists()


def test_linked_module_has_one_import_name() -> None:
    assert sessionkv.ipc.messages.__name__ == "sessionkv.ipc.messages"
    assert Path(sessionkv.ipc.messages.__file__).resolve().parent == ROOT / "ipc"
