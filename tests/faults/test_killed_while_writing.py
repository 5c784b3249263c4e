"""Killed at any point of writing: what was acknowledged is there, and nothing there is wrong."""

from __future__ import annotations

import os
import random
import select
import signal
import struct
from pathlib import Path
from typing import NoReturn

from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory, disk_bytes
from sessionkv.store.journal import Journal
from sessionkv.types import PutHead, PutNode
from tests.builders.store import IDENTITY, chain, geometry, head, node, payload

CAP = 3 * 2**20
BLOCK = 16_384


def write_for_ever(path: Path, acknowledge: int) -> NoReturn:
    """Turns and blocks as fast as it goes, each turn acknowledged once it is durable."""
    directory = StoreDirectory.open(path)
    journal = Journal(directory)
    number = journal.load().next_node_id
    store = BlockStore(directory, IDENTITY, geometry(BLOCK), cap_bytes=CAP)
    while True:
        parent = number - 1 or None
        journal.commit([[PutNode(node(number, parent)), PutHead(head("a", number))]])
        os.write(acknowledge, struct.pack("<Q", number))
        records = chain([number, 0, 0, number] * 5 + [number % 3])
        store.write_many([(r, memoryview(payload(r, BLOCK))) for r in records])
        if number % 7 == 0:
            store.delete([records[-1].key])
        number += 1


def test_neither_database_is_written_through_a_map_or_without_syncing(tmp_path: Path) -> None:
    with StoreDirectory.open(tmp_path / "store") as directory:
        journal = Journal(directory)
        store = BlockStore(directory, IDENTITY, geometry(BLOCK), cap_bytes=CAP)
        for env in (journal._env, store._index._env):
            flags = env.flags()
            assert (flags["writemap"], flags["sync"], flags["metasync"]) == (False, True, True)
        store.close()
        journal.close()


def test_twenty_kills(tmp_path: Path) -> None:
    rng = random.Random(3)
    path = tmp_path / "store"
    acknowledged = 0
    for _ in range(20):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(read)
                write_for_ever(path, write)
            finally:
                os._exit(1)
        os.close(write)
        try:
            # The random point is in the child's work, not in its start.
            for _ in range(rng.randint(1, 12)):
                assert select.select([read], [], [], 60)[0]
                acknowledged = struct.unpack("<Q", os.read(read, 8))[0]
            select.select([], [], [], rng.random() * 0.02)
            os.kill(pid, signal.SIGKILL)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
            while data := os.read(read, 8):
                acknowledged = struct.unpack("<Q", data)[0]
        finally:
            os.close(read)
        with StoreDirectory.open(path) as directory:
            journal = Journal(directory)
            state = journal.load()
            assert (journal.quarantined, journal.damaged_records) == (None, 0)
            assert [n.node_id for n in state.nodes] == list(range(1, state.next_node_id))
            # One turn may be durable and not acknowledged, none the other way round.
            assert state.next_node_id - 1 in (acknowledged, acknowledged + 1)
            assert [h.node_id for h in state.heads] == [state.next_node_id - 1]
            journal.close()
            store = BlockStore(directory, IDENTITY, geometry(BLOCK), cap_bytes=CAP)
            blocks = store.stats().blocks
            assert store.verify() == (blocks, 0)
            assert disk_bytes(directory.blocks_path) <= CAP
            store.close()
    assert acknowledged > 60
