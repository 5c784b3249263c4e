"""A child made by fork is told that the store is not its own; the parent's is untouched."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from sessionkv.errors import StoreError
from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.journal import Journal
from sessionkv.types import MoveOutcome, PutNode
from tests.builders.store import IDENTITY, ROOT, block, geometry, node, payload, query


def test_the_child_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    directory = StoreDirectory.open(tmp_path / "store")
    journal = Journal(directory)
    journal.commit([[PutNode(node(1))]])
    store = BlockStore(directory, IDENTITY, geometry(), cap_bytes=2**24)
    record = block(ROOT, [1] * 4)
    view = memoryview(payload(record))
    uses: list[Callable[[], object]] = [
        journal.load,
        lambda: journal.commit([]),
        lambda: store.lookup(query([1] * 4)),
        lambda: store.write(record, view),
        lambda: store.delete([record.key]),
        store.stats,
        store.verify,
    ]
    pid = os.fork()
    if pid == 0:
        refused = 0
        try:
            for use in uses:
                try:
                    use()
                except StoreError as error:
                    refused += "may not be used in its fork" in error.message
        finally:
            os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == len(uses)
    for i in range(2, 102):
        journal.commit([[PutNode(node(i, 1))]])
        written = block(ROOT, [i] * 4)
        assert store.write(written, memoryview(payload(written))) is MoveOutcome.OK
    assert len(journal.load().nodes) == 101
    assert store.verify() == (100, 0)
    store.close()
    journal.close()
    directory.close()
