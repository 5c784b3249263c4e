"""What the journal costs: opening it, finding a session, making a turn durable, forking.

A store of 100,000 sessions of three turns of 200 tokens is made first, some 700 MB. Turns are
committed as the engine does, through the store's thread, alone and 64 at a time; beside them the
same disk's fsync of one page. The fork is of a session of 100,000 tokens, asked of a whole core
(without sockets) and counted until its answer, which comes when it is durable: with the store on
the disk, and in memory, where what is left is the product's own time.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.engines import CHECKSUM_CONFIG
from benchmarks.report import Row, median_row, ratio_row, timed
from benchmarks.store.filled_journal import TENANT, fill, session_name
from benchmarks.store.options import StoreOptions
from sessionkv.config import LimitsConfig
from sessionkv.engine.build import build_engine
from sessionkv.engine.core import Core
from sessionkv.engine.messages import Call, CallDone, Drain
from sessionkv.ipc import messages as wire
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.journal import Journal
from sessionkv.store.questions import FindSession, ListSessions
from sessionkv.store.worker import Committed, StoreWorker
from sessionkv.types import JournalOp, PutHead, PutNode, StoredSession

ABOUT = "journal of 100,000 sessions: opening, a turn made durable, a fork of 100,000 tokens"
TURNS, TOKENS = 3, 200
LONG_TURNS = 500
CONCURRENT = 64
MEMORY = Path("/dev/shm")


def run(
    sessions: int = 100_000, *, repeats: int = 5, commits: int = 640, folder: Path | None = None
) -> list[Row]:
    """All figures; the store is made in ``folder`` and removed at the end."""
    with tempfile.TemporaryDirectory(prefix="sessionkv-journal-", dir=folder) as made:
        path = Path(made)
        with _journal(path) as journal:
            fill(journal, sessions, turns=TURNS, tokens=TOKENS)
            journal.commit([_long_session(journal)])
        rows = _opening(path, sessions, repeats)
        rows += _questions(path, sessions, repeats)
        rows += _turns(path, commits, repeats)
        rows += _core(path, repeats)
        return rows + _fork_in_memory(repeats)


def measure(options: StoreOptions) -> list[Row]:
    """As :func:`run`, as a part of ``python -m benchmarks.store``."""
    return run(repeats=options.repeats, folder=options.folder)


@contextmanager
def _journal(path: Path) -> Iterator[Journal]:
    with StoreDirectory.open(path / "store") as directory:
        journal = Journal(directory)
        try:
            yield journal
        finally:
            journal.close()


def _opening(path: Path, sessions: int, repeats: int) -> list[Row]:
    data = path / "store" / "journal" / "data.mdb"

    def opened() -> None:
        with _journal(path) as journal:
            journal.summary()

    def cold() -> float:
        fd = os.open(data, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        return timed(opened)

    name = f"{sessions:,} sessions"
    return [
        Row(f"journal of {name}", data.stat().st_size / 2**20, "MiB"),
        median_row(
            f"open, {name}, page cache cold", [cold() for _ in range(repeats)], "s",
            bound=("<=", 1.0),
        ),
        median_row(f"open, {name}, warm", [timed(opened) for _ in range(repeats)], "s"),
    ]  # fmt: skip


def _questions(path: Path, sessions: int, repeats: int) -> list[Row]:
    with _journal(path) as journal:
        finds, pages = [], []
        for i in range(200 * repeats):
            name = session_name(i * 7919 % sessions)
            finds.append(timed(lambda n=name: journal.answer(FindSession(TENANT, n))) * 1e6)
        for i in range(repeats):
            asked = ListSessions(TENANT, after=session_name(i * 7919 % sessions), limit=1000)
            pages.append(timed(lambda q=asked: journal.answer(q)) * 1e3)
    return [
        median_row(f"find a session of {TURNS} turns", finds, "us"),
        median_row("a page of 1,000 sessions", pages, "ms"),
    ]


def _turns(path: Path, commits: int, repeats: int) -> list[Row]:
    """A turn's node and head, submitted as the engine does, alone and 64 at a time."""
    syncs, alone, shared = [], [], []
    with StoreDirectory.open(path / "store") as directory:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        journal = Journal(directory)
        turns = _some_turns(journal, repeats * 2 * commits)
        worker = StoreWorker(journal, None, answers)

        def commit(count: int) -> None:
            for ticket in range(count):
                worker.commit(ticket, next(turns))
            for _ in range(count):
                answer = answers.get(timeout=60)
                if not isinstance(answer, Committed) or answer.error:
                    raise RuntimeError(f"a turn was not committed: {answer}")

        for _ in range(repeats):
            syncs.append(_sync_s(path, 100) * 1e3)
            alone.append(timed(lambda: [commit(1) for _ in range(commits // 8)]) / (commits // 8))
            rounds = commits // CONCURRENT
            shared.append(timed(lambda n=rounds: [commit(CONCURRENT) for _ in range(n)]))
        worker.close(5)
    each = [took / (commits // CONCURRENT * CONCURRENT) * 1e3 for took in shared]
    sync = median_row("fsync of 4 KiB on the same disk", syncs, "ms")
    one = median_row("a turn made durable, alone", [took * 1e3 for took in alone], "ms")
    many = median_row(f"a turn made durable, {CONCURRENT} at a time", each, "ms")
    return [
        sync,
        one,
        many,
        Row(f"turns made durable, {CONCURRENT} at a time", 1e3 / many.value, "/s", many.n),
        ratio_row("alone over fsync", one, sync),
        ratio_row(f"{CONCURRENT} at a time over alone", many, one, bound=("<=", 0.5)),
    ]


def _some_turns(journal: Journal, count: int) -> Iterator[list[JournalOp]]:
    """One turn after the other on each of some sessions."""
    found = [journal.answer(FindSession(TENANT, session_name(i))) for i in range(1000)]
    ends = [
        (session.head, session.nodes[-1].record)
        for session in found
        if isinstance(session, StoredSession)
    ]
    turns = []
    for i in range(count):
        head, last = ends[i % len(ends)]
        node = replace(last, node_id=journal.summary().next_node_id + i, parent_id=last.node_id)
        ends[i % len(ends)] = replace(head, node_id=node.node_id), node
        turns.append([PutNode(node), PutHead(ends[i % len(ends)][0])])
    return iter(turns)


def _sync_s(path: Path, count: int) -> float:
    """Seconds of one write of a page and its fsync."""
    fd = os.open(path / "sync", os.O_RDWR | os.O_CREAT)
    try:
        page = os.urandom(4096)

        def once() -> None:
            os.pwrite(fd, page, 0)
            os.fdatasync(fd)

        once()
        return timed(lambda: [once() for _ in range(count)]) / count
    finally:
        os.close(fd)


def _long_session(journal: Journal) -> list[JournalOp]:
    """One more session, of 100,000 tokens."""
    found = journal.answer(FindSession(TENANT, session_name(0)))
    if not isinstance(found, StoredSession):
        raise RuntimeError("the journal lacks a session")
    root, turn = found.nodes[0].record, found.nodes[1].record
    first_id = journal.summary().next_node_id
    ops: list[JournalOp] = [PutNode(replace(root, node_id=first_id))]
    for i in range(1, LONG_TURNS + 1):
        ops.append(PutNode(replace(turn, node_id=first_id + i, parent_id=first_id + i - 1)))
    head = replace(found.head, name="long", node_id=first_id + LONG_TURNS)
    return [*ops, PutHead(head)]


class _Front:
    """Takes what core says."""

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, messages: list[Any]) -> None:
        for message in messages:
            self.said.put(message)


def _fork_in_memory(repeats: int) -> list[Row]:
    """The same fork where making it durable costs nothing."""
    with tempfile.TemporaryDirectory(prefix="sessionkv-journal-", dir=MEMORY) as made:
        path = Path(made)
        with _journal(path) as journal:
            fill(journal, 1, turns=TURNS, tokens=TOKENS)
            journal.commit([_long_session(journal)])
        fork = next(row for row in _core(path, repeats) if row.name.startswith("fork"))
    name = fork.name.replace("durable on the disk", "store in memory")
    return [replace(fork, name=name, bound=("<=", 1.0))]


def _core(path: Path, repeats: int) -> list[Row]:
    # The store is as full as may be by default, and is to be forked in.
    config = replace(CHECKSUM_CONFIG, store=path / "store", limits=LimitsConfig(sessions=2**20))
    started = time.perf_counter()
    built = build_engine(config)
    start_s = time.perf_counter() - started
    front = _Front()
    core = Core(built.parts, built.inbox, front)
    thread = threading.Thread(target=core.run)
    thread.start()
    numbers = iter(range(1, 10**9))

    def call(request: wire.Request) -> Any:
        core.inbox.put(Call(next(numbers), TENANT, request))
        done = front.said.get(timeout=60)
        if not isinstance(done, CallDone) or done.error:
            raise RuntimeError(f"core answered {done}")
        return done.value

    try:
        first_s = timed(lambda: call(wire.Info(id=1, session="long")))
        before = built.parts.kv.ledger()
        took = [
            timed(lambda i=i: call(wire.Fork(id=1, session="long", name=f"fork-{i}"))) * 1e3
            for i in range(20 * repeats)
        ]
        same = built.parts.kv.ledger() == before
        loaded = built.parts.tree.num_bytes / 2**20
        tokens = call(wire.Info(id=1, session="long"))["tokens"]
    finally:
        core.inbox.put(Drain(1.0))
        thread.join()
        built.resources.close()
    return [
        Row("start of an engine on it, checksum model", start_s, "s", bound=("<=", 1.0)),
        Row(f"first use of a session of {tokens:,} tokens", first_s * 1e3, "ms"),
        Row("memory of its turns", loaded, "MiB"),
        median_row(f"fork of {tokens:,} tokens, durable on the disk", took, "ms"),
        Row("KV blocks it took", 0.0 if same else 1.0, "blocks", bound=("<=", 0.0)),
    ]
