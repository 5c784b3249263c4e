"""A second engine on one directory is refused by name, however it spells the path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sessionkv.errors import StoreInUse
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.journal import Journal
from sessionkv.types import PutNode
from tests.builders.engine import GREEDY, engine_config, open_engine, oracle
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


def test_a_second_engine_of_this_process_leaves_the_first_one_alone(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(0o700)
    (tmp_path / "link").symlink_to("store")
    log = [1, 2, 3]
    with open_engine(engine_config(tmp_path / "store")) as engine:
        log += engine.open("a").turn(tokens=log, sampling=GREEDY).tokens
        for spelling in ("store", "link", "store/../store"):
            with (
                pytest.raises(StoreInUse, match=f"{tmp_path}/store is in use"),
                open_engine(engine_config(tmp_path / spelling)),
            ):
                pass
        result = engine.session("a").turn(tokens=[4], sampling=GREEDY)
        assert list(result.tokens) == oracle([*log, 4])
        engine.assert_ledger()
    with open_engine(engine_config(tmp_path / "link")) as engine:
        assert engine.session("a").info().turns == 2
