"""A database that would crash the process when read is moved aside; the rest goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.journal import Journal
from sessionkv.store.lacking_pages import num_lacking
from sessionkv.store.lmdb_layout import Unsound
from sessionkv.types import PutNode
from tests.builders.store import IDENTITY, ROOT, block, geometry, node, payload

# Opens everything, writes to it and says what it found. In a process of its own: the fault is a
# signal.
CHILD = """
import json, sys
from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.journal import Journal
from sessionkv.types import PutNode
from tests.builders.store import IDENTITY, ROOT, block, geometry, node, payload
with StoreDirectory.open(sys.argv[1]) as directory:
    journal = Journal(directory)
    turns = len(journal.load().nodes)
    journal.commit([[PutNode(node(1000))]])
    store = BlockStore(directory, IDENTITY, geometry(), cap_bytes=2**24)
    sound, bad = store.verify()
    record = block(ROOT, [1000])
    written = store.write(record, memoryview(payload(record))).value
    moved = journal.quarantined and journal.quarantined.name
    print(json.dumps([turns, moved, sound, bad, written]))
    store.close()
    journal.close()
"""


def truncated(data: bytes) -> bytes:
    return data[: 3 * 4096]


def cut_short(data: bytes) -> bytes:
    return data[:100]


def emptied(_: bytes) -> bytes:
    return b""


def zeroed(data: bytes) -> bytes:
    return bytes(len(data))


def without_last_page(data: bytes) -> bytes:
    """The last that is in use: free ones may be lacking, and nothing is lost with them."""
    with tempfile.NamedTemporaryFile() as file, suppress(Unsound):
        path = Path(file.name)
        path.write_bytes(data)
        while not num_lacking(path):
            data = data[:-4096]
            path.write_bytes(data)
    return data


@pytest.mark.parametrize("harm", [truncated, cut_short, emptied, zeroed, without_last_page])
@pytest.mark.parametrize("which", ["journal", "index"])
def test_a_harmed_database_is_moved_aside(tmp_path: Path, harm: object, which: str) -> None:
    with StoreDirectory.open(tmp_path / "store") as directory:
        journal = Journal(directory)
        for i in range(1, 41):
            journal.commit([[PutNode(node(i, i - 1 or None, reply_blob=bytes(3000)))]])
        journal.close()
        store = BlockStore(directory, IDENTITY, geometry(), cap_bytes=2**24)
        for i in range(40):
            record = block(ROOT, [i] * 4)
            store.write(record, memoryview(payload(record)))
        store.close()
        index = directory.blocks_path / IDENTITY.hex() / "index"
        data = (directory.journal_path if which == "journal" else index) / "data.mdb"
    original = data.read_bytes()
    assert callable(harm)
    data.write_bytes(harm(original))
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "store")],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if which == "journal":
        assert found == [0, "journal.damaged-1", 40, 0, "ok"]
        kept = tmp_path / "store" / "journal.damaged-1" / "data.mdb"
        assert kept.read_bytes() == harm(original)
    else:
        assert found == [40, None, 0, 0, "ok"]
    assert b"is damaged" in done.stderr
