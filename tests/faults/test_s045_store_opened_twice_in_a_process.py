"""A second engine on one directory is refused by name, however it spells the path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sessionkv.errors import StoreInUse
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.journal import Journal
from sessionkv.types import PutNode
from tests.builders.store import node


def test_refused_while_open_and_whole_afterwards(tmp_path: Path) -> None:
    first = StoreDirectory.open(tmp_path / "store")
    journal = Journal(first)
    journal.commit([[PutNode(node(1))]])
    (tmp_path / "link").symlink_to("store")
    for spelling in ("store", "link", "store/../store", "link/."):
        with pytest.raises(
            StoreInUse, match=f"{tmp_path}/store is in use by process {os.getpid()}"
        ):
            StoreDirectory.open(tmp_path / spelling)
    journal.commit([[PutNode(node(2, 1))]])
    journal.close()
    first.close()
    with StoreDirectory.open(tmp_path / "link") as again:
        journal = Journal(again)
        assert [n.node_id for n in journal.load().nodes] == [1, 2]
        journal.close()
