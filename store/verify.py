"""Reads everything in the store of a stopped engine and says what is damaged.

What is found wrong is a :class:`Problem`; nothing is changed, and nothing stops the search but a
disk that fails. Must not know who asks, nor what turns mean.
"""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sessionkv.errors import StoreError
from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.environment import check_environment
from sessionkv.store.index_rows import check_rows, repair_rows
from sessionkv.store.journal import Journal
from sessionkv.store.questions import ListSessions, SessionPage
from sessionkv.store.set_aside import set_aside
from sessionkv.store.stopped import StoredBlocks, identity_folders
from sessionkv.types import TOKEN_BYTES, NodeRecord, SessionRow

Progress = Callable[[str, int, int | None], None]
"""Called with a stage, how much of it is done, and of how much."""

_OPEN_TO_OTHERS = 0o077
_TELL_EVERY = 64
_NO_CAP = 2**62


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as it was written, or not as it should be.

    Attributes:
        place: A path inside the store, and what in it.
        what: What is wrong.
    """

    place: str
    what: str


@dataclass(slots=True)
class Verified:
    """What was read, and what was wrong with it."""

    problems: list[Problem] = field(default_factory=list)
    sessions: int = 0
    turns: int = 0
    keys: int = 0
    blocks: int = 0
    bad_blocks: int = 0
    block_stores: int = 0

    def add(self, place: str, what: str) -> None:
        """Note a problem."""
        self.problems.append(Problem(place, what))


def verify_store(directory: StoreDirectory, *, progress: Progress) -> Verified:
    """Read the journal and every block. O(bytes on disk).

    Raises:
        OSError: The disk refuses a folder or a file's name.
    """
    found = Verified()
    for problem in _permissions(directory.path):
        found.problems.append(problem)
    for moved in set_aside(directory.journal_path):
        found.add(
            moved.path.name,
            f"a damaged journal that was set aside on {moved.moved_at}; its sessions are not "
            "served: remove the folder when you do not need it any more",
        )
    _verify_journal(directory, found, progress)
    for identity, path in identity_folders(directory):
        found.block_stores += 1
        _verify_blocks(directory, identity, path, found, progress)
    return found


def _permissions(top: Path) -> Iterator[Problem]:
    """Files and folders that others than the owner may reach into."""
    for path in (top, *sorted(top.rglob("*"))):
        found = path.lstat()
        if found.st_mode & _OPEN_TO_OTHERS and not stat.S_ISLNK(found.st_mode):
            allowed = "0700" if stat.S_ISDIR(found.st_mode) else "0600"
            mode = f"{stat.S_IMODE(found.st_mode):04o}"
            yield Problem(_place(top, path), f"its mode is {mode}, not {allowed}")


def _verify_journal(directory: StoreDirectory, found: Verified, progress: Progress) -> None:
    progress("journal", 0, None)
    path = directory.journal_path
    if not (path / "data.mdb").exists():
        return  # a store that no engine has finished making
    damage = check_environment(path, whole=True)
    if damage is not None:
        found.add("journal", damage)
        return
    try:
        journal = Journal(directory)
    except StoreError as error:
        found.add("journal", error.message)
        return
    try:
        for what in _records(journal, found):
            found.add("journal", what)
    finally:
        journal.close()
    progress("journal", 1, 1)


def _records(journal: Journal, found: Verified) -> Iterator[str]:
    """What is wrong with the journal's records, and with the rows derived from them."""
    state, figures, summary = journal.load(), journal.figures(), journal.summary()
    if journal.recounted:
        yield f"the counts of {journal.recounted} tenants were damaged; they were made anew"
    found.turns = sum(node.parent_id is not None for node in state.nodes)
    found.sessions, found.keys = len(state.heads), len(state.keys)
    for noun, there, readable in (
        ("turns (and roots)", figures.num_nodes, len(state.nodes)),
        ("sessions", summary.num_sessions, len(state.heads)),
        ("idempotency keys", figures.num_keys, len(state.keys)),
    ):
        if there != readable:
            yield f"{there - readable} of {there} {noun} are damaged, or need one that is"
    ends = _ends(state.nodes)
    listed = set()
    for tenant in sorted({head.tenant for head in state.heads}):
        for row in _rows(journal, tenant):
            head = row.head
            listed.add((head.tenant, head.name))
            if ends.get(head.node_id) not in (None, (row.num_turns, row.num_tokens)):
                yield f"session {head.name!r} is listed with a wrong number of turns or tokens"
    unlisted = sum((head.tenant, head.name) not in listed for head in state.heads)
    if unlisted:
        yield f"{unlisted} sessions are in no list of names"


def _ends(nodes: Iterable[NodeRecord]) -> dict[int, tuple[int, int]]:
    """Turns and tokens from the root to the end of each node."""
    ends: dict[int, tuple[int, int]] = {}
    for node in nodes:
        num_turns, num_tokens = ends[node.parent_id] if node.parent_id is not None else (-1, 0)
        ends[node.node_id] = num_turns + 1, num_tokens + len(node.token_ids) // TOKEN_BYTES
    return ends


def _rows(journal: Journal, tenant: str) -> Iterator[SessionRow]:
    """A tenant's sessions as a list shows them, those without a name of their own too."""
    for prefix in ("", "~"):
        after: str | None = None
        while True:
            page = journal.answer(ListSessions(tenant, prefix, after))
            if not isinstance(page, SessionPage):
                return
            yield from page.rows
            after = page.after
            if after is None:
                break


def _verify_blocks(
    directory: StoreDirectory, identity: bytes, path: Path, found: Verified, progress: Progress
) -> None:
    place = _place(directory.path, path)
    stage = f"blocks {identity.hex()[:8]}"
    with StoredBlocks(directory, identity, whole=True) as blocks:
        if blocks.damage is not None:
            found.add(f"{place}/index", blocks.damage)
            return
        total, done = blocks.num_blocks(), 0
        for bad in blocks.bad_blocks():
            done += 1
            if bad is not None:
                found.bad_blocks += 1
                found.add(f"{place}, block {bad.key.hex()[:16]} in slot {bad.slot}", bad.what)
            if done % _TELL_EVERY == 0:
                progress(stage, done, total)
        progress(stage, total, total)
        found.blocks += done
        for what in check_rows(blocks.index):
            found.add(f"{place}/index", what)


def _place(top: Path, path: Path) -> str:
    return "." if path == top else str(path.relative_to(top))


def repair_blocks(directory: StoreDirectory) -> int:
    """Remove damaged records of KV, and block stores whose index is damaged; how many blocks.

    Raises:
        StoreUnavailable: A block store cannot be opened.
    """
    removed = 0
    for identity, path in identity_folders(directory):
        with StoredBlocks(directory, identity, whole=True) as stored:
            geometry = stored.geometry
            num_blocks = 0 if stored.damage is not None else stored.num_blocks()
            if geometry is not None:
                removed += repair_rows(stored.index)
        if geometry is None:
            shutil.rmtree(path)
            removed += num_blocks
            continue
        blocks = BlockStore(directory, identity, geometry, cap_bytes=_NO_CAP)
        try:
            removed += blocks.verify()[1]
        finally:
            blocks.close()
    return removed
